"""Record: the calls of ``keep`` in one forward of a region, in order, and how far its replay has come."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torchckpt.regions.private import hooks_in_force, pop_hooks, push_hooks
from torchckpt.regions.state.boundary import Hooks
from torchckpt.regions.state.determinism import keeps_differently
from torchckpt.typing import Function

__all__ = ["KeptCall", "KeptCalls", "hooks_entered", "only"]

class KeptCall(NamedTuple):
    """One call of ``keep`` in one forward."""

    name: str
    """The name of the function in errors."""
    place: int | None
    """How many tensors the region had saved before; None for a region of torch, which does not tell."""
    result: Any = None
    buffers: Any = ()

    def __str__(self) -> str:
        return self.name if self.place is None else f"{self.name}, after {self.place} saved tensors"


class KeptCalls:
    """The calls of ``keep`` in one forward of a frame, and how far its replay has come."""

    __slots__ = ("_calls", "_fault", "_fresh", "_taken")

    def __init__(self) -> None:
        self._calls: list[KeptCall] = []
        self._taken = 0
        self._fresh: Sequence[object] | None = None  # while a replay is under way
        self._fault: tuple[int, str, str] | None = None  # no exception, which would hold the replay's tensors

    def add(self, call: KeptCall) -> None:
        self._calls.append(call)

    def begin(self, fresh: Sequence[object] | None) -> None:
        """Note that a replay begins, which will save its tensors in ``fresh``. None: the replay has failed."""
        self._taken, self._fresh, self._fault = 0, fresh, None

    def next(self, region: Any, name: str, checked: bool) -> KeptCall:
        """The forward's call that the replay of ``region``, which now calls the function ``name``, has come to."""
        number, now = self._taken, KeptCall(name, None if self._fresh is None else len(self._fresh))
        then = self._calls[number] if number < len(self._calls) else None
        if self._fault is None and (then is None or (checked and then[:2] != now[:2])):
            self._fault = number, "nothing" if then is None else str(then), str(now)
        if self._fault is not None:
            raise keeps_differently(region, *self._fault)
        self._taken += 1
        return self._calls[number]

    def end(self, region: Function, checked: bool) -> None:
        """Note the end of the replay. Raises if a call is missing, or if ``region`` caught what :meth:`next` raised."""
        fresh, self._fresh = self._fresh or (), None
        if checked and self._fault is None and self._taken < len(self._calls):
            then = self._calls[self._taken]
            if then.place is not None and then.place < len(fresh):
                self._fault = self._taken, str(then), "nothing there"
        if self._fault is not None:
            raise keeps_differently(region, *self._fault)


def hooks_entered() -> list[Hooks]:
    """The saved-tensor hooks of this thread, from the outermost pair to the one in force."""
    stack = []
    while (hooks := hooks_in_force(True)) is not None:
        stack.append(hooks)
        pop_hooks()
    stack.reverse()
    _exchange((), stack)
    return stack


@contextmanager
def only(hooks: Sequence[Hooks]) -> Iterator[None]:
    """Inside the block, ``hooks`` are in force in place of those that were entered."""
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
