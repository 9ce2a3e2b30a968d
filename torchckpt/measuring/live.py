"""Live: the bytes that are alive in each action of a step, and what watches operators meanwhile."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from torchckpt.planning import Action, Kind
from torchckpt.planning.step.memory import Level, Piece
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.live import LiveStorages
from torchckpt.regions.private import DispatchMode, running_node, take_from_modes

__all__ = ["LiveBytes", "Watch"]


class Watch(DispatchMode):
    """Has the storages that operators make counted, while :attr:`live` is set. It may stay entered for longer."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.live: LiveStorages | None = None
        self.in_backward: Callable[[], None] | None = None
        """Called once, before the next operator of a backward."""
        self.before: Callable[[], None] | None = None
        """Called before each operator."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo compiles under it: what it runs as it is under a mode, it never compiles again."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.before is not None:
            self.before()
        if self.in_backward is not None and running_node() is not None:
            call, self.in_backward = self.in_backward, None
            call()
        return func(*args, **(kwargs or {})) if self.live is None else self.live.call(func, args, kwargs)

    def stop(self) -> None:
        """Leave, if it is entered, and let go of all. Inside of a backward the former is undone when it ends."""
        self.live = self.before = self.in_backward = None
        take_from_modes(self)


class LiveBytes(LiveStorages):
    """Counts what is alive in each action of a step."""

    def __init__(self, device: torch.device, looks: bool = True, *step: Any) -> None:
        torch.clear_autocast_cache()  # which may hold casts of a step before: this one makes its own
        super().__init__(device, looks, *step)
        self._action: Action | None = None
        self._entered_bytes = 0.0
        self._pieces: list[Piece] = []
        self._is_idle = self._has_replayed = False
        self.levels: dict[Action, Level] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A context around the step."""
        with self.watching():
            yield
        self.reaches(None)

    def reaches(self, action: Action | None) -> None:
        """Note that ``action`` begins, if it has not. It lasts until another does; None ends the last action."""
        if action is not None and action == self._action:
            return
        pieces, self._pieces = self._pieces, []
        is_forward = self._action is not None and self._action.kind is Kind.FORWARD
        self.passes(sum(not piece.is_replay for piece in pieces) if is_forward else 0)
        last = self._pieces.pop()
        if self._action is not None and (self.looks or self.allocator):
            highest = max(piece.highest for piece in (*pieces, last))
            every = (*pieces, last) if pieces else ()
            self.levels[self._action] = Level(highest, last.left, self._entered_bytes, every)
        self._action, self._entered_bytes = action, last.highest if self._is_idle else 0.0
        self._is_idle = self._has_replayed = False

    def passes(self, block: int, is_replay: bool = False) -> None:
        """Note that a piece of the current action ends: ``block``, or the replay before it."""
        highest = self.highest()
        self.begin()
        self._pieces.append(Piece(block, is_replay, float(highest), float(self.now())))

    def ends(self) -> None:
        """Note that the current action ends. What is alive from now on, the next one enters with."""
        self.reaches(None)
        self._is_idle = True

    @contextmanager
    def replaying(self, block: int, frame: Frame | None = None) -> Iterator[None]:
        """A context around a replay of ``block`` in the current action: a piece, and another ends before it. That of a
        ``frame`` runs on to the end of its forward, to show what that takes where it is kept, if bytes are counted."""
        if not (self.looks or self.allocator):
            frame = None
        if not self._has_replayed:
            self._entered_bytes = max(self._entered_bytes, float(self.highest()))
        self._has_replayed = True
        self.passes(block + 1)
        passed = len(self._pieces)
        if frame is not None:
            frame.tail = partial(self.passes, block, is_replay=True)
        try:
            yield
        finally:
            if frame is not None:
                frame.tail = None
        highest = float(self.highest())
        self.passes(block, is_replay=True)
        if len(self._pieces) > passed + 1:
            last = self._pieces.pop()
            self._pieces[-1] = self._pieces[-1]._replace(left=last.left, tail=highest)
