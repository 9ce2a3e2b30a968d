"""Extra memory: memory that a step needs in addition to the activations of its regions and stages, for each action.

This memory is gradients, messages in transit, losses, and the temporary memory of operations. It is measured in a step
that recomputes everything. A step of a plan needs the same, with one exception: a region uses temporary bytes while it
runs, and a kept region continues to hold most of them.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchckpt.model.plan.search.replay import Choices, Level, levels
from torchckpt.model.plan.stage.stage import Stage
from torchckpt.model.schedule.action import Action, Kind
from torchckpt.model.schedule.schedule import Schedule

__all__ = ["ExtraMemory", "MeasuredStep", "peak_bytes"]


class ExtraMemory(NamedTuple):
    """Additional bytes of one action, beyond the activations of regions and stages."""

    rises: float
    """Bytes from the start of the action to its highest point."""
    leaves: float
    """Bytes that the action adds for later actions; negative if it frees bytes."""
    enters: float = 0.0
    """As ``rises``, but only until it starts to recompute. A plan may keep more bytes at that moment."""


@dataclass(frozen=True)
class MeasuredStep:
    """One measured step in which every region was recomputed. Bytes are relative to those alive before the step."""

    schedule: Schedule
    choices: Choices
    levels: Mapping[Action, Level]

    def peaks(self) -> list[float]:
        """The peak bytes of each rank."""
        return [max((self._level(one).highest for one in order), default=0.0) for order in self.schedule.ranks]

    def least(self, stages: Sequence[Stage]) -> list[float]:
        """For each rank, by how many bytes its peak was above the peak that ``stages`` predict."""
        said = (levels(order, stages, self.choices) for order in self.schedule.ranks)
        most = (max((level.highest for level in own), default=0.0) for own in said)
        return [max(0.0, peak - own) for peak, own in zip(self.peaks(), most)]

    def most(self, stages: Sequence[Stage]) -> list[float]:
        """For each rank, the most bytes that any action needed beyond those that ``stages`` predict."""
        found = []
        for order in self.schedule.ranks:
            pairs = zip(order, levels(order, stages, self.choices))
            found.append(max((self._level(one).highest - said.highest for one, said in pairs), default=0.0))
        return [max(0.0, most) for most in found]

    def beside(self, stages: Sequence[Stage]) -> dict[Action, ExtraMemory]:
        """The extra memory of each action."""
        found = {}
        for order in self.schedule.ranks:
            before = held = 0.0
            for action, said in zip(order, levels(order, stages, self.choices)):
                own = self._level(action)
                left = own.left - said.left
                enters = max(0.0, own.entered - held - before)
                found[action] = ExtraMemory(own.highest - said.highest - before, left - before, enters)
                before, held = left, said.left
        return found

    def _level(self, action: Action) -> Level:
        return self.levels.get(action, Level(0.0, 0.0))


def peak_bytes(
    order: Sequence[Action], stages: Sequence[Stage], choices: Choices, beside: Mapping[Action, ExtraMemory]
) -> float:
    """The peak bytes of one rank in a step of a plan; ``order`` has the actions of the rank."""
    highest = before = held = 0.0
    for action, said in zip(order, levels(order, stages, choices)):
        visit, stage = (action.stage, action.micro_batch), stages[action.stage]
        own = _of(action, beside)
        if action.kind is Kind.FORWARD:
            own = _less(own, _last_kept(choices[visit].kept, stage))
        elif action.kind is Kind.RECOMPUTE and not own.rises:  # nothing was replayed then
            run = beside.get(action._replace(kind=Kind.FORWARD), _NOTHING)
            last = stage.blocks[min(choices[visit].early)]  # they are replayed from the last one to the first
            own = ExtraMemory(_less(run, last.freed_bytes).rises - run.leaves, 0.0)
        highest = max(highest, said.highest + before + own.rises, held + before + own.enters)
        before, held = before + own.leaves, said.left
    return highest


_NOTHING = ExtraMemory(0.0, 0.0)


def _of(action: Action, beside: Mapping[Action, ExtraMemory]) -> ExtraMemory:
    """The extra memory of ``action``. If its backward was measured in two parts, it is that of both together."""
    if action in beside or action.kind is not Kind.BACKWARD:
        return beside.get(action, _NOTHING)
    rises = leaves = 0.0
    for kind in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD):
        part = beside.get(action._replace(kind=kind), _NOTHING)
        rises, leaves = max(rises, leaves + part.rises), leaves + part.leaves
    return ExtraMemory(rises, leaves)


def _less(own: ExtraMemory, held: float) -> ExtraMemory:
    """The extra memory of a forward, without temporary bytes that it now holds afterwards (``held``)."""
    return ExtraMemory(own.leaves + max(0.0, own.rises - own.leaves - held), own.leaves)


def _last_kept(kept: Sequence[int], stage: Stage) -> float:
    """The bytes of the kept blocks at the end of ``stage``, up to the last one that is dropped."""
    held, at = 0.0, len(stage.blocks) - 1
    while at in kept:
        held, at = held + stage.blocks[at].freed_bytes, at - 1
    return held
