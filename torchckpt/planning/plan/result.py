"""Result: the plan that users get: its figures, and how it is printed, drawn and stored."""
from __future__ import annotations

from dataclasses import dataclass

from torchckpt.planning.figures import Drawn
from torchckpt.planning.order.schedule import Schedule
from torchckpt.planning.plan.figures import PlanFigures
from torchckpt.planning.plan.problem import Problem
from torchckpt.planning.plan.stored import read, written
from torchckpt.planning.plan.text import picture, summary, table
from torchckpt.planning.work.choice import Choices

__all__ = ["PipelinePlan"]


@dataclass(frozen=True)
class PipelinePlan(PlanFigures, Drawn):
    """What :func:`~torchckpt.planning.plan.pipeline.plan_pipeline` found."""

    @classmethod
    def of(cls, problem: Problem, schedule: Schedule, choices: Choices) -> PipelinePlan:
        """The plan. If a rank holds more than its budget, for its order was given, what it holds is its budget."""
        plan = cls(problem, schedule, choices)
        if not plan.over_budget:
            return plan
        return cls(problem.within(tuple(map(max, plan.peak_bytes, problem.budget_bytes))), schedule, choices)

    @property
    def summary(self) -> str:
        """One line: the step, its bound, and what people do without a plan."""
        return summary(self)

    def print(self) -> None:
        """The tables by stage and by rank, and what the plan is worth."""
        print(self)

    def _svg(self) -> str:
        """Who does what when, and of each rank the memory over time under its budget."""
        return picture(self)

    def to_json(self) -> str:
        """For :meth:`from_json`."""
        return written(self)

    @classmethod
    def from_json(cls, text: str) -> PipelinePlan:
        """The plan that :meth:`to_json` wrote.

        Raises:
            ArgumentError: ``text`` is no plan, or is one that cannot run as it says: its orders, recomputes and bytes
                are counted again.
        """
        stored = read(text)
        return cls(stored.problem, stored.schedule, stored.choices, stored.asked, stored.whole_step)

    def __str__(self) -> str:
        return f"{table(self)}\n\n{self.summary}"
