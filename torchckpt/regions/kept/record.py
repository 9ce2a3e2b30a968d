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
    name: str
    """Of the function, as errors call it."""
    place: int | None
    """How many tensors the region had saved before; None of a region whose forward kept nothing."""
    result: Any = None
    buffers: Any = ()

    def __str__(self) -> str:
        return self.name if self.place is None else f"{self.name}, after {self.place} saved tensors"


class KeptCalls:
    """One per frame in whose forward ``keep`` was called."""

    __slots__ = ("_calls", "_fault", "_fresh", "_taken")

    def __init__(self) -> None:
        self._calls: list[KeptCall] = []
        self._taken = 0
        self._fresh: Sequence[object] | None = None  # while a replay is under way
        self._fault: tuple[int, str, str] | None = None  # no exception, which would hold the replay's tensors

    def add(self, call: KeptCall) -> None:
        self._calls.append(call)

    def begin(self, fresh: Sequence[object] | None) -> None:
        """A replay begins; ``fresh`` will be what it saves. None: it has failed."""
        self._taken, self._fresh, self._fault = 0, fresh, None

    def next(self, region: Any, name: str, checked: bool) -> KeptCall:
        """The call that the replay of ``region`` has come to, which is of a function ``name``."""
        number, now = self._taken, KeptCall(name, None if self._fresh is None else len(self._fresh))
        then = self._calls[number] if number < len(self._calls) else None
        if self._fault is None and (then is None or (checked and then[:2] != now[:2])):
            self._fault = number, "nothing" if then is None else str(then), str(now)
        if self._fault is not None:
            raise keeps_differently(region, *self._fault)
        self._taken += 1
        return self._calls[number]

    def end(self, region: Function, checked: bool) -> None:
        """The replay has ended: raises if a call is missing, or ``region`` caught what :meth:`next` raised."""
        fresh, self._fresh = self._fresh or (), None
        if checked and self._fault is None and self._taken < len(self._calls):
            then = self._calls[self._taken]
            if then.place is not None and then.place < len(fresh):
                self._fault = self._taken, str(then), "nothing there"
        if self._fault is not None:
            raise keeps_differently(region, *self._fault)


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
