"""Schedule: the order of actions on every rank, as data."""
from __future__ import annotations

from dataclasses import dataclass

from torchckpt.model.action import Action

__all__ = ["Schedule"]


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

    @property
    def stages(self) -> int:
        return len(self.placement)
