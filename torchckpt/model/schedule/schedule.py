"""Schedule: the order of actions on every rank, as data."""
from __future__ import annotations

from dataclasses import dataclass

from torchckpt.model.schedule.action import Action

__all__ = ["Schedule", "Segments"]


@dataclass(frozen=True)
class Segments:
    """How a stage is recomputed: it has ``total`` segments of equal size. ``R`` recomputes the last ``early`` of them.
    The backward recomputes the others, one at a time, each right before its own part of the backward."""

    early: int = 1
    total: int = 1


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order. Immutable; made by functions of ``schedules.py``, ``from_csv``, or by hand.

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
    late: frozenset[tuple[int, int]] = frozenset()
    """The (stage, micro-batch) pairs whose ``R`` starts only when the gradient has arrived."""
    segments: tuple[Segments, ...] = ()
    """For each stage, the segments that its ``R`` recomputes. Default: empty; each ``R`` recomputes its whole stage."""

    @property
    def stages(self) -> int:
        return len(self.placement)
