"""Allocations: the bytes that a function takes, above its start.

They are those of PyTorch's CPU allocator, as its profiler reports them: one event for each allocation and each free, in
the order of time, temporaries inside kernels included. So a peak is exact to the byte, and the same each time; that of
some convolutions hangs on the number of threads, each of which has a workspace. What a library takes from ``malloc``
itself is not in it: scratch pads of oneDNN, buffers of MKL, Python's objects.
"""
from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile

__all__ = ["live_bytes", "measured_peak", "workspace_bytes"]


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


def workspace_bytes(function: Callable[[], object], operations: Sequence[str]) -> int:
    """The most bytes that one of these ``operations`` takes within ``function()`` beside what it leaves."""
    with _collector_off(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        function()
    roots, most = profiler.profiler.kineto_results.experimental_event_tree()[::-1], 0
    while roots:
        event = roots.pop()
        if event.name in operations:
            taken = list(accumulate((part.alloc_size for part in _allocations([event])), initial=0))
            most = max(most, max(taken) - max(taken[-1], 0))
        roots.extend(event.children[::-1])
    return most


def _changes(profiler: profile) -> Iterator[int]:
    """The size of each allocation, and its negative where it is freed.

    A free counts by its address and not by what the event says: the allocator remembers addresses of earlier profiles
    that were freed, and used again, when nobody watched.
    """
    sizes: dict[int, int] = {}
    for event in _allocations(profiler.profiler.kineto_results.experimental_event_tree()):
        if event.alloc_size > 0:
            sizes[event.ptr] = event.alloc_size
            yield event.alloc_size
        elif event.ptr in sizes:
            yield -sizes.pop(event.ptr)


def _allocations(tree: Sequence[Any]) -> list[Any]:
    """The CPU allocator's events, in the order of time; the tree has those of one nanosecond in theirs."""
    events, left = [], tree[::-1]
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
