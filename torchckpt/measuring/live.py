"""Live: the bytes that are alive in each action of a step."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchckpt.planning import Action
from torchckpt.planning.step.memory import Level
from torchckpt.regions.live import LiveStorages

__all__ = ["LiveBytes"]


class LiveBytes(LiveStorages):  # type: ignore[no-untyped-call]  # in torch
    """Counts what is alive in each action of a step.

    Args:
        more_bytes: added to the levels of every action.
    """

    def __init__(self, device: torch.device, looks: bool = True, more_bytes: float = 0.0) -> None:
        super().__init__(device, looks)
        self._more_bytes = more_bytes
        self._action: Action | None = None
        self._entered_bytes = 0.0
        self._is_idle = self._has_replayed = False
        self.levels: dict[Action, Level] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A context around the step."""
        if self.looks:
            with self:
                yield
        else:
            yield
        self.reaches(None)

    def reaches(self, action: Action | None) -> None:
        """Note that ``action`` begins. It lasts until the next call; None ends the last action."""
        highest = self.highest()
        self.begin()
        if self._action is not None and (self.looks or self.allocator):
            amounts = highest, self.now(), self._entered_bytes
            self.levels[self._action] = Level(*(amount + self._more_bytes for amount in amounts))
        self._action, self._entered_bytes = action, float(highest) if self._is_idle else 0.0
        self._is_idle = self._has_replayed = False

    def ends(self) -> None:
        """Note that the current action ends. What is alive from now on, the next one enters with."""
        self.reaches(None)
        self._is_idle = True

    def replays(self) -> None:
        """Note that the current action starts a replay."""
        if not self._has_replayed:
            self._entered_bytes = max(self._entered_bytes, float(self.highest()))
        self._has_replayed = True
