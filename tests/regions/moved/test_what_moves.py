"""Which storages go to the host, each whole and once, and which stay."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchckpt
from tests.helpers import leaf
from tests.regions.moved.calls import let_cpu_move, sizes
from torchckpt.regions.moved import copies as copies_module
from torchckpt.regions.moved import region as regions
from torchckpt.regions.moved.copies import copies_of, goes_from
from torchckpt.regions.moved.region import Moved
from torchckpt.regions.moved.slot import stays


def away(function, *make, least=1):
    """The bytes of the storages that a region lets go of, in the order of sending.

    The region is ``function``, called on what each of ``make`` returns, which nobody else holds at the end."""
    region = Moved(least)
    loss = region.forward(function, tuple(one() for one in make), {})
    sent = list(region._moving())
    region.release()
    gone = [storage.size for storage in sent if storage.is_away]
    del sent
    assert list(region.away_bytes.values()) == gone
    loss.backward()
    assert used_bytes(loss.device) == 0
    return gone


def used_bytes(device):
    """The bytes of the host that are in use."""
    arena = copies_of(device).arena
    arena._settle()
    return arena.used_bytes


@pytest.fixture
def hidden(device):
    """Makes an activation: it requires grad, and is no leaf."""
    return lambda: leaf(4, 8, device=device) * 2


def test_results_go_and_weights_stay(device, hidden):
    linear = nn.Linear(8, 16).to(device)
    # exp saves its result, tanh too; the linear layer saves its input, which is the result of exp
    assert away(lambda x: linear(x.exp()).tanh().sum(), hidden) == [128, 256]


def test_an_input_goes_if_nobody_else_holds_it(hidden):
    assert away(lambda x: x.sin().sum(), hidden) == [128]
    x = hidden()
    assert away(lambda x: x.sin().sum(), lambda: x) == []


def test_leaves_that_require_grad_stay(device, hidden):
    assert away(lambda x: x.sin().sum(), lambda: leaf(4, 8, device=device)) == []
    assert away(lambda x, y: (x * y).sum(), hidden, lambda: leaf(4, 8, device=device)) == [128]


class SavesFlat(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.view(-1))
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad + 0 * ctx.saved_tensors[0].view_as(grad)


def test_views_that_a_function_makes_of_its_inputs_are_no_leaves(device, hidden):
    assert away(lambda x: SavesFlat.apply(x).sum(), hidden) == [128]
    assert away(lambda x: SavesFlat.apply(x).sum(), lambda: leaf(4, 8, device=device)) == []


def test_what_is_there_before_and_needs_no_gradient_stays(device, hidden):
    mask, closed = torch.rand(4, 8, device=device), torch.rand(4, 8, device=device)
    assert away(lambda x, mask: (x * mask * closed).sum(), hidden, lambda: mask) == []
    # what is made of it inside goes
    assert away(lambda x, mask: (x * (mask > 0.5)).sum(), hidden, lambda: mask) == [32]


def test_buffers_and_their_views_stay(device, hidden):
    norm = nn.BatchNorm1d(8).to(device)
    norm.register_buffer("table", torch.rand(4, 8, device=device))
    gone = away(lambda x: (norm(x) * norm.table[:]).sum(), hidden)
    assert sorted(gone) == [32, 32, 128]  # mean and deviation of the batch, and the input


def test_views_and_other_aliases_of_a_parameter_stay(device, hidden):
    weight = nn.Parameter(torch.rand(8, 8, device=device))
    for alias in (weight, weight.t(), weight[:4], weight.detach(), weight.data[:, :4], weight.view(64)):
        assert away(lambda x, alias=alias: (x.sum() * alias).sum(), hidden, least=5) == []


def test_small_storages_stay(hidden):
    def function(x):
        return x.exp().sum() + x[:1].exp().sum()

    assert away(function, hidden) == [128, 32]
    assert away(function, hidden, least=32) == [128, 32]
    assert away(function, hidden, least=33) == [128]
    assert away(function, hidden, least=129) == []


def test_one_storage_goes_once_and_whole(device, hidden):
    linear = nn.Linear(8, 24).to(device)

    def attention(x):
        query, key, value = linear(x).chunk(3, dim=-1)
        return ((query * key) * value).sum()

    # query, key and value are one storage
    assert sorted(away(attention, hidden)) == [128, 128, 384]


def test_a_small_part_of_a_large_storage_counts_as_all_of_it(hidden):
    assert away(lambda x: x.exp()[:1].sin().sum(), hidden, least=128) == [128]


def test_what_a_layer_remembers_stays(hidden):
    remembered = []

    def function(x):
        y = x.exp()
        remembered.append(y)
        return y.sum()

    assert away(function, hidden) == []


def test_what_the_caller_holds_at_the_release_stays(hidden):
    region, skip = Moved(1), hidden()
    out = region.forward(torch.sin, (skip,), {})
    (storage,) = region._moving()
    region.release()
    assert not storage.is_away
    assert storage.piece is None
    (skip * out).sum().backward()


def test_sent_once_if_two_regions_save_it_and_back_for_the_one_that_is_used_first(device):
    first, second = Moved(1), Moved(1)
    x = leaf(4, 8, device=device)
    between = first.forward(torch.exp, (x,), {})  # which saves its result
    assert sizes(first) == [128]
    out = second.forward(torch.sin, (between,), {})
    assert (sizes(first), sizes(second)) == ([], [128])
    (storage,) = second._moving()
    expected = (between.cos() * between).detach()
    del between
    first.release()
    assert not storage.is_away
    second.release()
    assert storage.is_away
    first.issue()
    assert not storage.is_back
    second.issue()
    assert storage.is_back
    out.sum().backward()
    assert torch.equal(x.grad, expected)


def test_a_storage_that_changes_between_two_regions_stays(hidden):
    first, second = Moved(1), Moved(1)
    x = hidden()
    a = first.forward(torch.sin, (x,), {})
    with torch.no_grad():
        x.mul_(1)
    b = second.forward(torch.cos, (x,), {})
    assert (sizes(first), sizes(second)) == ([128], [])
    b.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        a.sum().backward()


# casts of weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["around", "inside", "inside without a cache"])
def test_casts_of_weights_by_autocast_stay(device, hidden, where):
    linear = nn.Linear(8, 16).to(device)
    cast = torch.autocast(device.type, torch.bfloat16, cache_enabled="without" not in where)

    def function(x):
        if where == "around":
            return linear(x).float().exp().sum()
        with cast:
            y = linear(x)
        return y.float().exp().sum()

    if where == "around":
        with cast:
            gone = away(function, hidden)
    else:
        gone = away(function, hidden)
    assert gone == [64, 256]  # the input in half of its bytes, and the result of exp


# places and bits ------------------------------------------------------------------------------------------------------


class Saved(torch.autograd.Function):
    """Saves what ``make`` makes of its input, and returns what came back of it by ``seen``."""

    @staticmethod
    def forward(ctx, x, make, seen):
        ctx.seen = seen
        ctx.save_for_backward(make(x.detach()))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(ctx.saved_tensors[0])
        return grad, None, None


MAKERS = {
    "contiguous": lambda x: x + 1,
    "transposed": lambda x: (x + 1).t(),
    "with an offset": lambda x: (x + 1)[1:, 3:],
    "every second": lambda x: (x + 1)[:, ::2],
    "expanded": lambda x: (x + 1)[:, :1].expand(4, 8),
    "overlapping": lambda x: (x + 1).unfold(1, 4, 2),
    "conjugated": lambda x: torch.complex(x, x + 1).conj(),
    "negated": lambda x: torch.complex(x, x + 1).conj().imag,
    "conjugated and negated": lambda x: torch._neg_view(torch.complex(x, x + 1).conj()),
    "another dtype": lambda x: (x + 1).view(torch.int32),
    "half": lambda x: (x + 1).bfloat16()[2:],
    "flags": lambda x: x > 0,
    "a scalar": lambda x: x.sum(),
    "channels last": lambda x: (x + 1).view(1, 2, 4, 4).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_view_comes_back_in_its_place(hidden, name):
    make, seen, x = MAKERS[name], [], hidden()
    expected = make(x.detach())
    region = Moved(1)
    out = region.forward(lambda x: Saved.apply(x, make, seen), (x,), {})
    (storage,) = region._moving()
    region.release()
    assert storage.is_away
    out.sum().backward()
    assert storage.is_back
    (came,) = seen
    assert torch.equal(came, expected)
    assert (came.dtype, came.shape, came.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert (came.storage_offset(), came.is_conj(), came.is_neg()) == (
        expected.storage_offset(), expected.is_conj(), expected.is_neg()
    )
    assert came.untyped_storage().nbytes() == expected.untyped_storage().nbytes()


def test_a_graph_that_is_kept_unpacks_one_tensor(hidden):
    seen, x = [], hidden()
    region = Moved(1)
    out = region.forward(lambda x: Saved.apply(x, lambda x: x + 1, seen), (x,), {}).sum()
    region.release()
    out.backward(retain_graph=True)
    out.backward()
    assert seen[0].untyped_storage().data_ptr() == seen[1].untyped_storage().data_ptr()


# what cannot go -------------------------------------------------------------------------------------------------------


class Unknown(torch.Tensor):
    """A subclass that does not say what it consists of."""


def made_of_numpy(dtype=torch.float32):
    numpy = pytest.importorskip("numpy")
    memory = numpy.zeros(4096, dtype=numpy.uint8)
    start = -memory.ctypes.data % 64 + 4
    return torch.from_numpy(memory[start : start + 1024].view(numpy.float32))


STAY = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "compressed": lambda: torch.eye(4).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "mkldnn": lambda: torch.ones(4).to_mkldnn(),
    "meta": lambda: torch.ones(4, device="meta"),
    "of another allocator": made_of_numpy,
    "an unknown subclass": lambda: torch.ones(4).as_subclass(Unknown),
    "empty": lambda: torch.empty(0),
    "a parameter": lambda: nn.Parameter(torch.ones(4)),
    "a leaf that requires grad": lambda: torch.ones(4, requires_grad=True),
}


@pytest.mark.filterwarnings("ignore:.*(prototype|beta state|nested tensors|quantiz)")
@pytest.mark.parametrize("name", STAY)
def test_it_stays(monkeypatch, name):
    let_cpu_move(monkeypatch)
    assert stays(STAY[name](), 1)
    assert not stays(torch.ones(4), 1)


def test_a_fake_tensor_stays():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        assert stays(torch.ones(4), 1)


def test_tensors_of_a_device_that_shares_the_memory_of_the_host_stay(monkeypatch):
    for kind, goes in ("mps", False), ("cuda", True), (None, False):
        monkeypatch.setattr(copies_module, "accelerator_type", lambda kind=kind: kind)
        assert goes_from(torch.device(kind or "cuda")) == goes
    assert not goes_from(torch.device("cpu"))


@pytest.mark.accelerator
def test_tensors_on_the_cpu_stay_beside_those_of_a_device(accelerator):
    def function(x, y):
        return x.exp().sum() + y.exp().sum().to(accelerator)

    def make(device):
        return lambda: leaf(4, 8, device=device) * 2

    assert away(function, make(accelerator), make("cpu")) == [128]


# nothing --------------------------------------------------------------------------------------------------------------


def test_nothing_moves_without_gradients(device, monkeypatch):
    monkeypatch.setattr(regions, "Moved", None)
    with torch.no_grad():
        torchckpt.offload(torch.exp, leaf(4, device=device), min_bytes=1)
    with torch.inference_mode():
        torchckpt.offload(torch.exp, leaf(4, device=device), min_bytes=1)


def test_a_region_whose_inputs_need_no_gradient_saves_nothing(device):
    region = Moved(1)
    assert not region.forward(torch.exp, (torch.ones(4, device=device),), {}).requires_grad
    assert sizes(region) == []


def test_dropout_as_in_the_plain_call(device):
    torch.manual_seed(0)
    a = F.dropout(torch.ones(100, device=device), 0.5)
    torch.manual_seed(0)
    assert torch.equal(torchckpt.offload(F.dropout, torch.ones(100, device=device), 0.5, min_bytes=1), a)
