"""Workers: one thread a stage, for stages whose work is asynchronous. Made for one forward, and gone after it."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

import torch

from torchckpt.kernel.ambient import settings, within
from torchckpt.kernel.private import hooks_in_force, pop_hooks, push_hooks

__all__ = ["Run", "in_caller", "workers"]

Task: TypeAlias = Callable[[], None]
Run: TypeAlias = Callable[[list[tuple[int, Task]]], None]
"""Runs tasks, each given with its stage, that do not depend on each other."""


def in_caller(tasks: list[tuple[int, Task]]) -> None:
    """Run the tasks here, in order."""
    for _, task in tasks:
        task()


@contextmanager
def workers(stages: int) -> Iterator[Run]:
    """Threads that run the tasks of a stage each, in the caller's ambient state.

    The first exception, of whatever kind, is raised in the caller, with its traceback, when the tasks that were started
    with it have ended. The threads end with the block.
    """
    in_caller_s_state = _ambient()
    with ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(1, f"torchckpt stage {stage}")) for stage in range(stages)]

        def run(tasks: list[tuple[int, Task]]) -> None:
            started = [threads[stage].submit(in_caller_s_state, task) for stage, task in tasks]
            wait(started)
            for future in started:
                _raise_from(future)

        yield run


def _raise_from(future: Future[None]) -> None:
    if (exception := future.exception()) is not None:
        raise exception


def _ambient() -> Callable[[Task], None]:
    """How to run a task in another thread with the settings, grad mode and saved-tensor hooks of this one."""
    then, graded, hooks = settings(), torch.is_grad_enabled(), hooks_in_force(False)

    def run(task: Task) -> None:
        with within(then), torch.set_grad_enabled(graded), ExitStack() as stack:
            if hooks is not None:
                push_hooks(*hooks)
                stack.callback(pop_hooks)
            task()

    return run


