"""Schedule: the order of actions on every rank, as data."""
from __future__ import annotations

from dataclasses import dataclass

from torchckpt.model.action import Action

__all__ = ["Schedule", "Segments"]


@dataclass(frozen=True)
class Segments:
    """How a stage is recomputed: as ``total`` segments of equal size, the last ``early`` of them by ``R``, the rest
    inside the backward, one at a time, each right before its own backward."""

    early: int = 1
    total: int = 1


@dataclass(frozen=True)
class Schedule:
    """What every rank does, in order. Immutable; made by the functions of ``schedules.py``, by ``csv``, or by hand.

    A rank runs its actions one after the other, and starts one only when what it depends on has been done: ``jFi`` on
    ``(j-1)Fi``; ``jBi`` and ``jIi`` on ``jFi``, on ``(j+1)Bi`` or ``(j+1)Ii``, and on ``jRi`` where there is one;
    ``jWi`` on ``jIi``; ``jRi`` on ``jFi``.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    """Per rank its actions, in order."""
    placement: tuple[int, ...]
    """Per stage the rank that it is on."""
    micro_batches: int
    late: frozenset[tuple[int, int]] = frozenset()
    """The (stage, micro-batch) whose ``R`` waits for the gradient first: recompute at arrival."""
    segments: tuple[Segments, ...] = ()
    """Per stage, how much of a recompute its ``R`` does. Empty: all of it."""

    @property
    def stages(self) -> int:
        return len(self.placement)
