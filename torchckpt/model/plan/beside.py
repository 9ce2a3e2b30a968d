"""Beside: what a step takes above what its regions and stages hold, by action.

Gradients, messages on their way, losses, and what an operation takes while it runs. A step that recomputes everything
is measured; a step of a plan takes the same beside, but for one thing. A forward takes what its last regions take while
they run, and then hold if they are kept.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchckpt.model.action import Action, Kind
from torchckpt.model.plan.replay import Choices, Level, levels
from torchckpt.model.plan.stage import Stage
from torchckpt.model.schedule import Schedule

__all__ = ["Took", "peak_bytes"]


@dataclass(frozen=True)
class Took:
    """One measured step, in which every region was recomputed. Bytes are those above what was there before it."""

    schedule: Schedule
    choices: Choices
    levels: Mapping[Action, Level]

    def peaks(self) -> list[float]:
        """Per rank."""
        return [max((self._level(one).highest for one in order), default=0.0) for order in self.schedule.ranks]

    def beside(self, stages: Sequence[Stage]) -> dict[Action, Level]:
        """Of each action, what it took, and what it left, beside what ``stages`` say."""
        found = {}
        for order in self.schedule.ranks:
            for action, said in zip(order, levels(order, stages, self.choices)):
                own = self._level(action)
                found[action] = Level(max(0.0, own.highest - said.highest), max(0.0, own.left - said.left))
        return found

    def _level(self, action: Action) -> Level:
        return self.levels.get(action, Level(0.0, 0.0))


def peak_bytes(
    order: Sequence[Action], stages: Sequence[Stage], choices: Choices, beside: Mapping[Action, Level]
) -> float:
    """Of one rank in a step of a plan, with ``order`` for its actions."""
    highest, left = 0.0, 0.0
    for action, said in zip(order, levels(order, stages, choices)):
        visit = action.stage, action.micro_batch
        own = _of(action, beside)
        if action.kind is Kind.FORWARD:
            own = _less(own, _together(choices[visit].kept, stages[action.stage]))
        elif action.kind is Kind.RECOMPUTE and own.highest <= own.left:  # nothing was replayed then
            run = beside.get(action._replace(kind=Kind.FORWARD), Level(0.0, 0.0))
            run = _less(run, _together(choices[visit].early, stages[action.stage]))
            own = Level(left + run.highest - run.left, left)
        highest, left = max(highest, said.highest + own.highest), own.left
    return highest


def _of(action: Action, beside: Mapping[Action, Level]) -> Level:
    """A whole backward that was a split one when it was measured takes what its parts took."""
    kinds = [action.kind]
    if action.kind is Kind.BACKWARD and action not in beside:
        kinds = [Kind.RECOMPUTE, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD]
    parts = [beside[one] for kind in kinds if (one := action._replace(kind=kind)) in beside]
    return Level(max((part.highest for part in parts), default=0.0), parts[-1].left if parts else 0.0)


def _less(own: Level, held: float) -> Level:
    """What a forward takes while it runs, as far as that is not what it holds afterwards."""
    return Level(own.left + max(0.0, own.highest - own.left - held), own.left)


def _together(blocks: Sequence[int], stage: Stage) -> float:
    """Bytes of the last of ``blocks``, and of those before it without a gap."""
    held, at = 0.0, max(blocks, default=-1)
    while at in blocks:
        held, at = held + stage.blocks[at].freed_bytes, at - 1
    return held
