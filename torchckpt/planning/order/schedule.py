"""Schedule: the order of actions on every rank, as data."""
from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

__all__ = ["Action", "Kind", "Schedule"]

class Kind(str, Enum):
    """The kind of an action. ``B`` is a whole backward; ``I`` (input gradients) and ``W`` (weight gradients) are its
    two halves."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    RECOMPUTE = "R"

    def __str__(self) -> str:
        return self.value


class Action(NamedTuple):
    """``Action(0, Kind.FORWARD, 3)`` is ``0F3``: stage 0, forward, micro-batch 3."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order, and nothing else. Immutable; made by functions of ``schedules.py``,
    ``from_csv``, or by hand.

    A rank runs its actions one after the other, and starts an action when all actions that it depends on are done.
    ``jFi`` depends on ``(j-1)Fi``. ``jBi`` and ``jIi`` depend on ``jFi``, on ``(j+1)Bi`` or ``(j+1)Ii``, and on
    ``jRi`` if the schedule has it. ``jWi`` depends on ``jIi``, and ``jRi`` on ``jFi``.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    """For each rank, its actions in order."""
    placement: tuple[int, ...]
    """For each stage, the rank that runs it."""
    micro_batches: int

    @property
    def stages(self) -> int:
        return len(self.placement)
