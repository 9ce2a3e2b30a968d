"""Workers: one thread a device, whose work is asynchronous. Made for one forward, and gone after it."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

import torch

from torchckpt.kernel.ambient import settings, within

__all__ = ["Run", "in_caller", "workers"]

Task: TypeAlias = Callable[[], None]
Run: TypeAlias = Callable[[list[tuple[int, Task]]], None]
"""Runs tasks that do not depend on each other, each given with the number of its worker."""


def in_caller(tasks: list[tuple[int, Task]]) -> None:
    """Run the tasks here, in order."""
    for _, task in tasks:
        task()


@contextmanager
def workers(count: int) -> Iterator[Run]:
    """Threads that run their tasks in order, with the grad mode, autocast and defaults of the caller.

    The first exception, of whatever kind, is raised in the caller, with its traceback, when the tasks that were started
    with it have ended. The threads end with the block.
    """
    as_in_caller = _ambient()
    with ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(1, f"torchckpt worker {n}")) for n in range(count)]

        def run(tasks: list[tuple[int, Task]]) -> None:
            started = [threads[worker].submit(as_in_caller, task) for worker, task in tasks]
            try:
                wait(started)
                while started:
                    _raise_from(started.pop(0))
            finally:
                started.clear()  # an exception holds these variables, and its future the exception

        yield run


def _raise_from(future: Future[None]) -> None:
    exception = future.exception()
    try:
        if exception is not None:
            raise exception
    finally:
        del future, exception


def _ambient() -> Callable[[Task], None]:
    then, graded = settings(), torch.is_grad_enabled()

    def run(task: Task) -> None:
        with within(then), torch.set_grad_enabled(graded):
            task()

    return run
