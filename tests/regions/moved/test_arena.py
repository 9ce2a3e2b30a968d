"""The arena: pieces by size, in order, of chunks that are pinned once; and what it says where there is no memory."""
from __future__ import annotations

import random
import threading
from contextlib import contextmanager
from itertools import count, pairwise

import pytest
import torch

from tests.helpers import leaf
from tests.regions.moved.calls import sizes
from torchckpt.errors import CheckpointError
from torchckpt.regions.moved import copies
from torchckpt.regions.moved.copies import Arena
from torchckpt.regions.moved.region import Moved

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture
def arena(monkeypatch):
    monkeypatch.setattr(copies, "_CHUNK_BYTES", 4096)
    return Arena(CPU)


def place(piece):
    """Where it begins, in its chunk, and how large it is."""
    return piece.bytes.storage_offset(), piece.bytes.numel()


def test_pieces_follow_each_other_in_steps_of_512_bytes(arena):
    assert [place(arena.take(size)) for size in (1, 512, 513)] == [(0, 512), (512, 512), (1024, 1024)]
    assert (arena.bytes, arena.used_bytes, arena.peak_bytes) == (4096, 2048, 2048)


def test_a_piece_that_is_given_back_is_the_next_of_its_size_the_oldest_first(arena):
    first, second, _ = (arena.take(512) for _ in range(3))
    arena.give(first.bytes, "read 1")
    arena.give(second.bytes, "read 2")
    assert place(arena.take(1024)) == (1536, 1024)
    third, fourth, fifth = (arena.take(512) for _ in range(3))
    assert (place(third), third.read) == (place(first), "read 1")
    assert (place(fourth), fourth.read) == (place(second), "read 2")
    assert (place(fifth), fifth.read) == ((2560, 512), None)


def test_when_all_is_back_the_chunks_are_empty_and_the_last_read_is_waited_for(arena):
    pieces = [arena.take(size) for size in (512, 1024)]
    arena.last_read = "read 1"  # the copy back that was queued last, whichever piece is given back last
    for number, piece in reversed([*enumerate(pieces)]):
        arena.give(piece.bytes, f"read {number}")
    other = arena.take(2048)
    assert (place(other), other.read) == ((0, 2048), "read 1")
    assert (arena.bytes, arena.used_bytes, arena.peak_bytes) == (4096, 2048, 2048)


def test_sizes_that_change_from_step_to_step_take_no_more_than_the_largest_step(arena):
    chosen = random.Random(0)
    for _ in range(100):
        pieces = [arena.take(chosen.randint(1, 1500)) for _ in range(2)]
        for piece in pieces:
            arena.give(piece.bytes)
    assert arena.bytes == 4096


def test_chunks_are_of_powers_of_two_and_a_piece_is_in_one(arena):
    sizes = [place(arena.take(size))[1] for size in (3000, 3000, 5000, 100)]
    assert sizes == [3072, 3072, 5120, 512]
    assert [chunk.numel() for chunk in arena._chunks] == [4096, 4096, 8192]
    assert [rest.numel() for rest in arena._rests] == [512, 1024, 3072]


def test_memory_can_be_pinned_before(arena):
    arena.reserve(4096 * 7)
    assert [chunk.numel() for chunk in arena._chunks] == [16384, 8192, 4096]
    arena.reserve(4096 * 7)
    assert arena.bytes == 4096 * 7
    arena.take(10000)
    assert len(arena._chunks) == 3


def test_pieces_in_use_are_apart(arena):
    chosen, out = random.Random(1), []
    for _ in range(500):
        if out and chosen.random() < 0.5:
            arena.give(out.pop(chosen.randrange(len(out))).bytes)
        else:
            out.append(arena.take(chosen.choice([100, 600, 1100, 5000])))
        spans = sorted((piece.bytes.data_ptr(), piece.bytes.numel()) for piece in out)
        assert all(start + size <= following for (start, size), (following, _) in pairwise(spans))
    arena._settle()
    assert arena.used_bytes == sum(piece.bytes.numel() for piece in out)


# no memory ------------------------------------------------------------------------------------------------------------

NO_MEMORY = (
    "the host has no pinned memory for what {} sends there\n"
    "  received: CUDA error: out of memory; 67,108,864 bytes were wanted, beside {:,} bytes\n"
    '  works:    a smaller host=; or fewer layers, offload_layers(model, "layers.*", every=2); or a higher '
    "limit, ulimit -l"
)


@contextmanager
def no_memory(monkeypatch):
    """Inside, no memory can be pinned."""
    empty = torch.empty

    def refuse(*size, pin_memory=None, **options):
        if pin_memory is not None:
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
        return empty(*size, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        yield


def test_no_pinned_memory_is_an_error_with_the_bytes(monkeypatch):
    arena = Arena(CPU)
    with no_memory(monkeypatch):
        for call in (lambda: arena.take(100), lambda: arena.reserve(100)):
            with pytest.raises(CheckpointError) as caught:
                call()
            assert str(caught.value) == NO_MEMORY.format("cpu", 0)


def test_where_there_is_none_nothing_is_lost(device, monkeypatch):
    """The region stays as it is, and its backward works."""
    copies.copies_of.cache_clear()
    region, x = Moved(1), leaf(4, device=device)
    loss = region.forward(lambda x: (x * 2).exp().sum(), (x,), {})
    with no_memory(monkeypatch), pytest.raises(CheckpointError, match="67,108,864 bytes were wanted, beside 0 bytes"):
        region.send()
    region.release()
    loss.backward()
    assert torch.equal(x.grad, (x * 2).exp().detach() * 2)
    copies.copies_of.cache_clear()


@pytest.mark.parametrize("number", [0, 1])
def test_where_a_copy_fails_all_stays_and_its_pieces_are_given_back(device, monkeypatch, number):
    copies.copies_of.cache_clear()
    region, x = Moved(1), leaf(4, device=device)
    loss = region.forward(lambda x: x.exp().exp().sum(), (x,), {})
    assert len(sizes(region)) == 2
    copy, calls = torch.Tensor.copy_, count()

    def fails(*args, **options):
        if next(calls) == number:
            raise KeyboardInterrupt
        return copy(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", fails)
        with pytest.raises(KeyboardInterrupt):
            region.send()
    arena = copies.copies_of(x.device).arena
    arena._settle()
    assert arena.used_bytes == 0
    region.release()
    loss.backward()
    expected = x.detach().requires_grad_()
    expected.exp().exp().sum().backward()
    assert torch.equal(x.grad, expected.grad)
    copies.copies_of.cache_clear()


@pytest.mark.accelerator
def test_it_is_pinned_once(accelerator):
    arena = Arena(accelerator)
    pieces = [arena.take(MIB) for _ in range(3)]
    assert all(piece.bytes.is_pinned() for piece in pieces)
    assert arena.bytes == 64 * MIB


def test_no_byte_is_handed_out_twice_where_another_thread_takes_while_memory_is_pinned(arena):
    """As one that measures the link to the host."""
    taken = []

    class Chunks(list):
        def append(self, chunk):
            super().append(chunk)
            thread.start()
            thread.join(0.3)

    arena._chunks, thread = Chunks(), threading.Thread(target=lambda: taken.append(arena.take(512)))
    arena.reserve(4096)
    thread.join(30)
    arena._chunks = list(arena._chunks)
    taken += [arena.take(4096 - 512), arena.take(512)]
    assert len({piece.bytes.data_ptr() for piece in taken}) == 3
