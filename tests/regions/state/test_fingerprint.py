"""The checksum of determinism_check="values", against a twin in Python's integers, and what it can tell apart."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.slow import few
from torchckpt import RecomputationError, checkpoint
from torchckpt.regions.core import slots
from torchckpt.regions.core.slots import fingerprint


def twin(tensor: Tensor) -> int:
    """The checksum by its definition, in Python's integers."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    size = tensor.element_size()
    raw = bytes(tensor.resolve_neg().contiguous().reshape(-1).view(torch.uint8).tolist())
    words = [int.from_bytes(raw[at : at + size], "little", signed=size > 1) for at in range(0, len(raw), size)]
    return wrapped(sum(mixed(wrapped(word + place * 0x1E3779B97F4A7C15)) for place, word in enumerate(words)))


def mixed(word: int) -> int:
    word %= 2**64  # without a sign, as in MurmurHash3
    for _ in range(2):
        word = (word ^ (word >> 33)) * 0x7F51AFD7ED558CCD % 2**64
    return word ^ (word >> 33)


def wrapped(number: int) -> int:
    """As a signed integer of 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


def example(dtype: torch.dtype, *shape: int) -> Tensor:
    """Elements of which, other than for bool and 8-bit types, no two are equal."""
    if dtype.is_complex:
        return torch.complex(torch.randn(shape), torch.randn(shape)).to(dtype)
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    if not dtype.is_floating_point:
        return torch.randint(0, 100, shape, dtype=dtype)
    return torch.randn(shape, dtype=torch.float64).to(dtype)


NARROW = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.complex64,
]  # fmt: skip
WIDE = [torch.int64, torch.float64, torch.complex128]


@pytest.mark.parametrize("shape", [(3, 5), (), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("dtype", NARROW + WIDE, ids=str)
def test_fingerprint_is_that_of_its_twin(dtype, shape, device):
    tensor = example(dtype, *shape)
    assert fingerprint(tensor.to(device)) == twin(tensor)


@pytest.mark.parametrize("dtype", NARROW + WIDE, ids=str)
def test_fingerprint_reads_elements_and_not_memory(dtype, device):
    tensor = example(dtype, 4, 6).to(device)
    assert fingerprint(tensor.t()) == fingerprint(tensor.t().contiguous())
    assert fingerprint(tensor[:, ::2]) == fingerprint(tensor[:, ::2].clone())
    assert fingerprint(tensor[1:]) == fingerprint(tensor[1:].clone())
    assert fingerprint(tensor[:, :1].expand(4, 3)) == fingerprint(tensor[:, :1].expand(4, 3).clone())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_fingerprint_of_conjugate_and_negative_views_is_that_of_their_values(dtype, device):
    tensor = example(dtype, 3, 5).to(device)
    conjugate, negative = tensor.conj(), tensor.conj().imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    assert fingerprint(conjugate) == fingerprint(conjugate.resolve_conj()) != fingerprint(tensor)
    assert fingerprint(negative) == fingerprint(negative.resolve_neg()) != fingerprint(tensor.imag)


@pytest.mark.parametrize("place", [0, 1, 23])
def test_fingerprint_tells_a_number_from_its_complement(place):
    """Such as the index 0 from -1: the same place where a tensor has one row, another one where it has more."""
    numbers = torch.arange(-12, 12)
    known = set()
    for number in range(-300, 300):
        numbers[place] = number
        known.add(fingerprint(numbers))
    assert len(known) == 600


def test_an_index_that_becomes_its_complement_is_other_values():
    indices = iter(([0], [-1]))

    def block(x):
        return x[torch.tensor(next(indices))].sum()

    loss = checkpoint(block, torch.randn(4, requires_grad=True) * 1, determinism_check="values")
    with pytest.raises(RecomputationError, match="with other values"):
        loss.backward()


@few(2)
@pytest.mark.parametrize("dtype", [d for d in NARROW + WIDE if d != torch.bool], ids=str)
def test_fingerprint_changes_with_any_one_element_and_with_any_swap(dtype):
    tensor = example(dtype, 24)
    known = {fingerprint(tensor)}
    for place in range(24):
        other = tensor.clone()
        other[place] = 101
        known.add(fingerprint(other))
    assert len(known) == 25
    for first in range(24):
        for second in range(first):
            if tensor[first] != tensor[second]:
                order = torch.arange(24)
                order[first], order[second] = second, first
                assert fingerprint(tensor[order]) != fingerprint(tensor)


@pytest.mark.parametrize("size", [2, 7, 64, 1024, 4096])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64, *WIDE], ids=str)
def test_fingerprint_changes_when_all_elements_change_alike(dtype, size):
    tensor = example(dtype, size).abs() if dtype != torch.complex64 else example(dtype, size)
    tensor = tensor + 1
    changed = {
        "negated": -tensor,
        "doubled": tensor * 2,
        "quartered": tensor / 4,
        "reversed": tensor.flip(0),
        "rolled": tensor.roll(1),
    }
    same = [name for name, other in changed.items() if fingerprint(other.to(dtype)) == fingerprint(tensor)]
    assert same == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("distance", [1, 2, 1024, 4096])
def test_fingerprint_changes_when_two_elements_that_differ_in_their_first_bits_are_swapped(dtype, distance):
    for low, high in ((1.0, -1.0), (1.0, 2.0), (0.0, 1.0)):
        tensor = torch.zeros(distance + 1, dtype=dtype)
        tensor[0], tensor[-1] = low, high
        assert fingerprint(tensor) != fingerprint(tensor.flip(0)), (low, high)


def test_fingerprint_tells_minus_zero_from_zero():
    assert fingerprint(torch.tensor(-0.0)) != fingerprint(torch.tensor(0.0))


def test_fingerprint_tells_nans_to_be_equal_to_themselves():
    tensor = torch.tensor([float("nan"), 1.0, float("inf")])
    assert fingerprint(tensor) == fingerprint(tensor.clone())


class Tagged(Tensor):
    pass


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.ones(3, device="meta"), torch.ones(3).as_subclass(Tagged)],
    ids=["sparse", "meta", "subclass"],
)
def test_fingerprint_is_none_where_there_are_no_bits_to_read(tensor):
    assert fingerprint(tensor) is None


def test_fingerprint_of_a_parameter_is_that_of_its_values():
    tensor = torch.randn(3)
    assert fingerprint(nn.Parameter(tensor)) == fingerprint(tensor)


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_fingerprint_does_not_depend_on_how_much_is_read_at_once(chunk, dtype, monkeypatch):
    tensor = torch.randn(50).to(dtype)
    whole = fingerprint(tensor)
    monkeypatch.setattr(slots, "_CHUNK", chunk)
    assert fingerprint(tensor) == whole


@pytest.mark.slow
def test_fingerprint_takes_a_multiple_of_a_chunk_and_not_of_the_tensor(monkeypatch):
    monkeypatch.setattr(slots, "_CHUNK", 2**10)
    tensor = torch.randn(2**19)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fingerprint(tensor)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest <= 2**19
