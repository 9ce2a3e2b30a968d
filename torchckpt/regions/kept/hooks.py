"""Hooks: the saved-tensor hooks that a thread has entered, all of them and not the last pair alone."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torchckpt.regions.private import hooks_in_force, pop_hooks, push_hooks
from torchckpt.regions.state.boundary import Hooks

__all__ = ["hooks_entered", "only"]


def hooks_entered() -> list[Hooks]:
    """From the outermost pair to the one in force."""
    stack = []
    while (hooks := hooks_in_force(True)) is not None:
        stack.append(hooks)
        pop_hooks()
    stack.reverse()
    _exchange((), stack)
    return stack


@contextmanager
def only(hooks: Sequence[Hooks]) -> Iterator[None]:
    """Inside, ``hooks`` in place of those that were entered."""
    stack = hooks_entered()
    _exchange(stack, hooks)
    try:
        yield
    finally:
        _exchange(hooks, stack)


def _exchange(old: Sequence[Hooks], new: Sequence[Hooks]) -> None:
    for _ in old:
        pop_hooks()
    for pack, unpack in new:
        push_hooks(pack, unpack)
