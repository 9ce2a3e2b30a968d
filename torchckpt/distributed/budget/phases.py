"""The two phases of a schedule with a budget: *measuring* its first steps, then *following* the plan made of them.

Each says in which order a step runs, what becomes of the regions of a visit, and in which steps bytes are counted.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from torchckpt.distributed.budget.arguments import budget_key
from torchckpt.distributed.budget.make_plan import digest_of
from torchckpt.planning import Action, Choice, Kind, Schedule, State, with_recompute
from torchckpt.planning.budget import Bytes
from torchckpt.planning.order.schedule import Visit
from torchckpt.planning.plan import PipelinePlan
from torchckpt.planning.plan.figures import WholeStep
from torchckpt.planning.plan.run.fit_measured import Fitted
from torchckpt.planning.plan.run.order import done_whole, summed_as_given
from torchckpt.planning.step.memory import Level

__all__ = ["FIRST_STEPS", "Following", "Levels", "Measuring"]

FIRST_STEPS = 4
"""With a budget: the steps that are measured before the plan is made."""

_COUNTED, _COUNTED_SPLIT = 1, 2
"""The steps in which bytes are counted: of whole backwards, and of split ones. Of the steps of a plan, the first of the
two."""

Levels: TypeAlias = Mapping[Action, Level]


class Measuring:
    """The first steps, in which every region is recomputed.

    A schedule with split backwards does whole ones until ``_COUNTED_SPLIT``. Then it does its own, and recomputes right
    before them: what a split backward recomputes stays until its end anyway.
    """

    def __init__(self, schedule: Schedule, budget: Bytes) -> None:
        self.budget = budget
        self.counted: list[tuple[Schedule, Levels]] = []
        """For each step in which bytes were counted, its order, and the levels of this rank's actions."""
        self._plain, self._budget_key = schedule, budget_key(budget, len(schedule.ranks))
        actions = [action for order in schedule.ranks for action in order]
        self._split = frozenset((stage, i) for stage, kind, i in actions if kind is Kind.INPUT_GRAD)
        self._is_whole = False
        self._split_order = with_recompute(schedule, dict.fromkeys(self._split, State.EARLY))
        self._whole_order = schedule

    def told(self) -> tuple[str, str]:
        """A key that is equal on all ranks that have the same budget, and its name in an error."""
        return self._budget_key, f"budget={self.budget!r}"

    def agreed(self, tied: bool) -> Measuring:
        """The phase, when all processes are about to make its first step. ``tied``: stages of one share parameters."""
        self._whole_order = done_whole(self._plain, tied)
        return self

    def order(self, step: int) -> Schedule:
        self._is_whole = bool(self._split) and step < _COUNTED_SPLIT
        return self._whole_order if self._is_whole else self._split_order

    def choice(self, visit: Visit) -> State:
        return State.EARLY if visit in self._split and not self._is_whole else State.LATE

    def counts(self, step: int) -> bool:
        return step == _COUNTED or (step == _COUNTED_SPLIT and bool(self._split))

    def count(self, order: Schedule, levels: Levels) -> None:
        """Note the levels of a step in which bytes were counted."""
        self.counted.append((order, levels))


class Following:
    """The steps of a plan, whose choices and order they run."""

    def __init__(self, fitted: Fitted) -> None:
        self.fitted, self.plan = fitted, fitted.plan
        self.levels: Levels = {}
        """The levels of this rank's actions in a step of the plan; empty until they were counted."""

    @classmethod
    def of(cls, plan: PipelinePlan) -> Following:
        """The phase of a ``plan`` that was made before, or in another run."""
        summed = summed_as_given(plan)
        return cls(Fitted(summed, *(plan.whole_step or WholeStep(plan.problem.budget_bytes, summed.peak_bytes))))

    def told(self) -> tuple[str, str]:
        """A key that is equal on all ranks that have the same plan, and its name in an error."""
        text = f"plan {digest_of(self.plan)}"
        return text, text

    def agreed(self, tied: bool) -> Following:
        """The phase, when all processes are about to make its first step. ``tied``: stages of one share parameters."""
        return Following(replace(self.fitted, plan=summed_as_given(self.plan, tied=True))) if tied else self

    def order(self, step: int) -> Schedule:
        return self.plan.schedule

    def choice(self, visit: Visit) -> Choice:
        return self.plan.step.choice(visit)

    def counts(self, step: int) -> bool:
        return step == _COUNTED

    def count(self, order: Schedule, levels: Levels) -> None:
        """Note the levels of a step in which bytes were counted."""
        self.levels = levels
