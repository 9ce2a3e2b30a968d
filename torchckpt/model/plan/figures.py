"""Figures: a decided plan, and what follows from it: times, peaks, shares. No text and no picture."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torchckpt.model.plan.problem import Problem, static_bytes
from torchckpt.model.plan.rules import Rule, everything, same_blocks
from torchckpt.model.plan.search.replay import Choices, replay
from torchckpt.model.schedule.schedule import Schedule
from torchckpt.model.simulation.timeline import Timeline

__all__ = ["PlanFigures"]


@dataclass(frozen=True)
class PlanFigures:
    """A plan as data, and its figures."""

    problem: Problem
    """What was planned: ``schedule``, ``stages``, ``links``, and ``budget_bytes`` of each rank."""
    schedule: Schedule
    """With an ``R`` for each visit of which something is recomputed early, and weight gradients where they are done."""
    choices: Choices
    """Per visit, (stage, micro-batch), which blocks are kept, early and late."""
    bound_seconds: float
    """No plan of the same schedule, stages and budget is shorter."""
    asked: Problem | None = None
    """What was asked, if blocks were moved between stages since."""

    @cached_property
    def timeline(self) -> Timeline:
        """When everything happens; memory is what the actions of a rank hold."""
        return replay(self.schedule, self.problem.stages, self.problem.links, self.choices)

    @cached_property
    def step_seconds(self) -> float:
        return self.timeline.step_seconds

    @property
    def gap(self) -> float:
        """The share by which the step is longer than the bound."""
        return max(0.0, self.step_seconds / self.bound_seconds - 1)

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per rank."""
        return self.timeline.peak_bytes

    @property
    def keep_all_seconds(self) -> float:
        """The step of what was asked, if nothing is recomputed, whatever memory that takes."""
        return (self.asked or self.problem).keep_all.step_seconds

    @cached_property
    def recomputed_share(self) -> float:
        """Of the seconds that recomputing every block of every visit takes."""
        stages, m = self.problem.stages, self.schedule.micro_batches
        every = m * sum(stage.recompute_seconds for stage in stages)
        return sum(self.recompute_seconds) / every if every else 0.0

    @cached_property
    def recompute_seconds(self) -> tuple[float, ...]:
        """Per stage, of all micro-batches."""
        found = [0.0] * len(self.problem.stages)
        for (stage, _), choice in self.choices.items():
            blocks = self.problem.stages[stage].blocks
            found[stage] += sum(blocks[at].recompute_seconds for at in (*choice.early, *choice.late))
        return tuple(found)

    @cached_property
    def all_recomputed(self) -> Rule:
        """The step in which every block is recomputed inside its backward."""
        return everything(self.asked or self.problem)

    @cached_property
    def same_recomputed(self) -> Rule:
        """The step in which the first k blocks of every stage are, of all micro-batches, with the best k that fits."""
        return same_blocks(self.asked or self.problem)

    @property
    def balance(self) -> tuple[int, ...]:
        """Blocks of each stage."""
        return tuple(len(stage.blocks) for stage in self.problem.stages)

    @property
    def static_bytes(self) -> tuple[float, ...]:
        """Per rank: parameters, gradients, optimizer state. No budget counts them."""
        return static_bytes(self.schedule, self.problem.stages)

    def overhead(self, seconds: float) -> float:
        """The share by which a step of so many seconds is longer than one that keeps all."""
        return seconds / self.keep_all_seconds - 1
