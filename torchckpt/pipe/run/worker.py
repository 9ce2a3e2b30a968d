"""Workers: one thread for each device, which launches the work of that device. ``Pipe.step`` has none.

They exist for one forward, and as long as its graph, for another forward that comes meanwhile. Autograd numbers the
nodes that a thread makes, and a backward runs those with larger numbers first. So where one backward has two forwards,
that of the later one runs first, as without a pipe: new threads would number both from zero.
"""
from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchckpt.regions.flags import is_checkpointing, is_recomputing, local
from torchckpt.regions.private import (
    DeviceContext,
    dispatch_modes_are_active,
    function_modes,
    hooks_in_force,
    profiler_is_on,
)
from torchckpt.regions.state.ambient import settings, use_settings

__all__ = ["RunTasks", "in_caller", "is_bound_to_caller", "keep_workers", "workers"]

Task: TypeAlias = Callable[[], None]
RunTasks: TypeAlias = Callable[[list[tuple[int, Task]]], None]
"""Runs pairs (worker number, task). The tasks must not depend on each other."""


def in_caller(tasks: list[tuple[int, Task]]) -> None:
    """Run the tasks here, in order."""
    for _, task in tasks:
        task()


def is_bound_to_caller() -> bool:
    """Whether this thread is in a state that other threads cannot share, so that all stages must run in it.

    Such states are: saved-tensor hooks (they see tensors in one order), a region, a scope that a schedule has set,
    torch's modes other than a default device, and a profiler."""
    return (
        hooks_in_force(False) is not None
        or is_checkpointing()
        or is_recomputing()
        or local.thread.scope is not None
        or dispatch_modes_are_active() > 0
        or not all(isinstance(mode, DeviceContext) for mode in function_modes())  # type: ignore[no-untyped-call]  # torch
        or profiler_is_on()
    )


class _Threads(list[ThreadPoolExecutor]):
    is_kept = False
    """Whether a graph keeps them."""


def _threads_there() -> _Threads | None:
    """Those that a graph of this thread keeps, or that are at work in its forward."""
    return None if local.thread.workers is None else local.thread.workers()


def keep_workers(outputs: Iterable[Tensor]) -> None:
    """Have the graph of ``outputs`` keep the workers that make it."""
    threads = _threads_there()
    if threads is None:
        return
    nodes: set[Any] = {output.grad_fn for output in outputs if output.grad_fn is not None}
    for node in nodes:
        node.metadata["torchckpt workers"] = threads
        threads.is_kept = True


def _in_child() -> None:
    local.thread.workers = None  # a child process has none of its parent's threads


os.register_at_fork(after_in_child=_in_child)


@contextmanager
def workers(count: int) -> Iterator[RunTasks]:
    """Have at least ``count`` threads, each of which runs its tasks in order, until the end of the block.

    Tasks see the caller's grad mode, autocast, default dtype and device, and context variables. If tasks raise, the
    first exception is raised in the caller, with its traceback, after all tasks of the same call have ended. If the
    caller is interrupted, no other task starts, and it waits for those that run: they would change buffers and draw
    numbers behind its back. A second interrupt ends this wait.
    """
    caller_settings, graded = settings(), torch.is_grad_enabled()
    threads = _threads_there() or _Threads()
    threads += [ThreadPoolExecutor(1, f"torchckpt worker {number}") for number in range(len(threads), count)]
    local.thread.workers = weakref.ref(threads)
    at_work = [Lock() for _ in threads]
    idle, is_over = True, False

    def as_in_caller(worker: int, held: list[Task]) -> None:
        # The pool holds its arguments a moment longer than the caller waits: not the task, and the tensors in it.
        task = held.pop()
        with at_work[worker], use_settings(caller_settings), torch.set_grad_enabled(graded):
            if not is_over:
                task()

    def run(tasks: list[tuple[int, Task]]) -> None:
        nonlocal idle
        idle = False
        started = [threads[worker].submit(copy_context().run, as_in_caller, worker, [task]) for worker, task in tasks]
        try:
            wait(started)
            idle = True
            while started:
                _raise_from(started.pop(0))
        finally:
            started.clear()  # a cycle otherwise: the exception holds this frame, and the future the exception

    try:
        yield run
    finally:
        if not (idle and threads.is_kept):
            local.thread.workers, is_over = None, True
            for thread in threads:
                thread.shutdown(wait=False, cancel_futures=True)
            for lock in at_work:  # not by the end of a thread: an interrupt of that would have Python take it for ended
                with lock:
                    pass
            for thread in threads:
                thread.shutdown()


def _raise_from(future: Future[None]) -> None:
    exception = future.exception()
    try:
        if exception is not None:
            raise exception
    finally:
        del future, exception
