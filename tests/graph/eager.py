"""Eager: one step of the model as it is, what a graph must be equal to, and the bytes that a step takes.

The bytes are those of PyTorch's CPU allocator, as its profiler reports them: one event for each allocation and each
free, in the order of time, of whatever thread the autograd engine uses, temporaries inside kernels included. So a peak
is exact to the byte, and the same each time; of some convolutions it hangs on the number of threads, each with a
workspace of its own. What a library takes from ``malloc`` itself, past the allocator, is not in it: oneDNN's scratch
pads and reordered weights, MKL's buffers, Python's objects.
"""
from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from tests.helpers import assert_equal

__all__ = ["Result", "assert_same", "live_bytes", "measured_peak", "step"]


class Result(NamedTuple):
    """What a step gave; all tensors are copies. A gradient is None where there is none."""

    outputs: Any
    gradients: dict[str, Tensor | None]  # of parameters by their names, of inputs as "inputs[0]"
    buffers: dict[str, Tensor]
    rng_states: list[Tensor]  # of the CPU, then of each CUDA device


def step(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    loss: Callable[[Any], Tensor],
    seed: int = 0,
    call: Callable[..., Any] | None = None,
) -> Result:
    """A forward, the loss, a backward. The model's buffers, and the generators, are afterwards as they were.

    Args:
        call: what runs in place of the model, on its parameters and buffers. Default: the model.
    """
    leaves = tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs)
    named = {**dict(model.named_parameters()), **{f"inputs[{place}]": leaf for place, leaf in enumerate(leaves)}}
    with torch.random.fork_rng(), _buffers_restored(model):
        torch.manual_seed(seed)
        model.zero_grad()
        outputs = (call or model)(*leaves)
        loss(outputs).backward()
        result = Result(
            pytree.tree_map_only(Tensor, _copy, outputs),
            {name: leaf.grad for name, leaf in named.items()},
            {name: buffer.clone() for name, buffer in model.named_buffers()},
            [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])],
        )
    model.zero_grad()
    return result


def assert_same(received: Result, expected: Result) -> None:
    """Raise AssertionError unless all is equal by ``torch.equal``: sparse is like sparse, coalesced; None like None."""
    assert_equal(*(pytree.tree_map_only(Tensor, _parts, result._asdict()) for result in (received, expected)))


def measured_peak(function: Callable[[], object]) -> int:
    """Bytes alive at the highest point of ``function()``, above the start: what it allocates and has not freed yet.

    What was there before counts for nothing, not even where ``function`` frees it.
    """
    return max(live_bytes(function), default=0)


def live_bytes(function: Callable[[], object]) -> list[int]:
    """Bytes that ``function()`` has allocated and not freed, after each of its allocations and frees, in their order.

    Allocations of Python threads of its own are not seen. The garbage collector is off meanwhile: the figures do not
    hang on when it runs, and what a reference cycle holds is alive.
    """
    with _collector_off(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        function()
    return list(accumulate(_changes(profiler)))


def _changes(profiler: profile) -> Iterator[int]:
    """The size of each allocation, and its negative where it is freed.

    A free counts by its address and not by what the event says: the allocator remembers addresses of earlier profiles
    that were freed, and used again, when nobody watched.
    """
    sizes: dict[int, int] = {}
    for event in _allocations(profiler):
        if event.alloc_size > 0:
            sizes[event.ptr] = event.alloc_size
            yield event.alloc_size
        elif event.ptr in sizes:
            yield -sizes.pop(event.ptr)


def _allocations(profiler: profile) -> list[Any]:
    """The CPU allocator's events, in the order of time; the tree has those of one nanosecond in theirs."""
    events, left = [], profiler.profiler.kineto_results.experimental_event_tree()[::-1]
    while left:
        event = left.pop()
        left.extend(event.children[::-1])
        if event.tag.name == "Allocation" and event.extra_fields.device.type == "cpu":
            events.append(event)
    events.sort(key=lambda event: event.start_time_ns)
    return [event.extra_fields for event in events]


@contextmanager
def _collector_off() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _buffers_restored(model: nn.Module) -> Iterator[None]:
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _parts(tensor: Tensor) -> Tensor | Mapping[str, Any]:
    """A sparse tensor as its size, indices and values; any other as it is."""
    if not tensor.is_sparse:
        return tensor
    tensor = tensor.coalesce()
    return {"size": tuple(tensor.shape), "indices": tensor.indices(), "values": tensor.values()}
