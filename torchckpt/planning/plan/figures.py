"""Figures: a decided plan, and what follows from it: times, peaks, shares. No text and no picture."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torchckpt.planning.order.schedule import Schedule
from torchckpt.planning.plan.problem import Problem
from torchckpt.planning.plan.rules import Rule, everything, same_blocks
from torchckpt.planning.step.simulated import Step
from torchckpt.planning.step.timeline import Timeline
from torchckpt.planning.work.choice import Choices

__all__ = ["PlanFigures", "WholeStep"]

_ROUNDING = 1e-9


class WholeStep(NamedTuple):
    """Bytes of each rank in a step: activations, and all that was measured beside them."""

    budget_bytes: tuple[float, ...]
    peak_bytes: tuple[float, ...]


@dataclass(frozen=True)
class PlanFigures:
    """A plan as data, and its figures."""

    problem: Problem
    """What was planned: ``schedule``, ``stages``, ``links``, and ``budget_bytes`` of each rank."""
    schedule: Schedule
    """With an ``R`` for each visit of which something is recomputed early, and weight gradients where they are done."""
    choices: Choices
    """Per visit, (stage, micro-batch), which blocks are kept, early and late."""
    asked: Problem | None = None
    """What was asked, if blocks were moved between stages since."""
    whole_step: WholeStep | None = None
    """If the plan was made of measured steps: the bytes of a whole step, not of activations alone."""

    @property
    def bound_seconds(self) -> float:
        """No plan of the same schedule, stages and budget is shorter."""
        return self.problem.bound_seconds

    @cached_property
    def step(self) -> Step:
        """The planned step."""
        return self.problem.step(self.choices, self.schedule)

    @property
    def timeline(self) -> Timeline:
        """When everything happens; memory is what the actions of a rank hold."""
        return self.step.timeline

    @property
    def step_seconds(self) -> float:
        return self.step.seconds

    @property
    def gap(self) -> float:
        """The share by which the step is longer than the bound."""
        return max(0.0, self.step_seconds / self.bound_seconds - 1)

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per rank."""
        return self.step.peak_bytes

    @property
    def over_budget(self) -> list[int]:
        """The ranks that hold more than their budget."""
        pairs = zip(self.peak_bytes, self.problem.budget_bytes)
        return [rank for rank, (peak, budget) in enumerate(pairs) if peak > budget * (1 + _ROUNDING)]

    @property
    def keep_all_seconds(self) -> float:
        """The step of what was asked, if nothing is recomputed, whatever memory that takes."""
        return (self.asked or self.problem).keep_all.seconds

    @cached_property
    def recomputed_share(self) -> float:
        """Of the seconds that recomputing every block of every visit takes."""
        stages, m = self.problem.stages, self.schedule.micro_batches
        every = m * sum(stage.recompute_seconds for stage in stages)
        return sum(self.recompute_seconds) / every if every else 0.0

    @cached_property
    def recompute_seconds(self) -> tuple[float, ...]:
        """Per stage, of all micro-batches."""
        seconds = [0.0] * len(self.problem.stages)
        for (stage, _), recompute in self.step.recomputed.items():
            seconds[stage] += recompute
        return tuple(seconds)

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
        return self.step.static_bytes

    def overhead(self, seconds: float) -> float:
        """The share by which a step of so many seconds is longer than one that keeps all."""
        return seconds / self.keep_all_seconds - 1
