"""Repair: change one visit of a plan after the other, until its step fits a budget and is short.

The search counts activations. The bytes that were measured beside them depend on the order of a step, too, so a plan
may exceed its budget by a few bytes on one rank, or leave many unused. Both are mended here, by counting whole steps.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torchckpt.planning.figures import Event
from torchckpt.planning.order.schedule import BACKWARDS, Action, Kind, Visit
from torchckpt.planning.plan.result import PipelinePlan
from torchckpt.planning.plan.run.extra_memory import ExtraMemory, highest_bytes
from torchckpt.planning.plan.search.lane import density
from torchckpt.planning.step.timeline import critical_path
from torchckpt.planning.work.choice import Choice

__all__ = ["repaired"]

_WORK, _FEWEST = 100_000, 100
"""The actions to simulate in all. If these are fewer than ``_FEWEST`` steps of the schedule, then so many steps."""


@dataclass
class _Budget:
    """The budget of each rank, what is measured beside the activations, and how many steps may still be counted."""

    limits: Sequence[float]
    beside: Mapping[Action, ExtraMemory]
    steps: int

    def excess(self, plan: PipelinePlan) -> list[tuple[float, int]]:
        """For each rank, the most bytes above its budget (below it: negative), and at which of its actions."""
        self.steps -= 1
        ranks = range(len(self.limits))
        levels = (list(highest_bytes(plan.step, rank, self.beside)) or [0.0] for rank in ranks)
        return [(max(level) - limit, level.index(max(level))) for level, limit in zip(levels, self.limits)]


def repaired(plan: PipelinePlan, limits: Sequence[float], beside: Mapping[Action, ExtraMemory]) -> PipelinePlan | None:
    """``plan`` with fewer blocks kept where it exceeds ``limits``, then with more where that makes the step shorter;
    None if no such plan was found."""
    actions = sum(map(len, plan.schedule.ranks))
    budget = _Budget(limits, beside, max(_FEWEST, _WORK // actions))
    fitting = _reduced(plan, budget)
    return fitting and _grown(fitting, budget)


def _reduced(plan: PipelinePlan, budget: _Budget) -> PipelinePlan | None:
    while budget.steps > 0:
        excess = budget.excess(plan)
        rank = max(range(len(excess)), key=lambda rank: excess[rank][0])
        if excess[rank][0] <= 0:
            return plan
        smaller = [_dropped(plan, visit) for visit in _alive(plan, rank, excess[rank][1])]
        if not smaller:
            return None
        plan = min(smaller, key=lambda other: other.step_seconds)
        budget.steps -= len(smaller)
    return None


def _grown(plan: PipelinePlan, budget: _Budget) -> PipelinePlan:
    """``plan`` with late blocks kept, first those of visits on the critical path, while the step gets shorter."""
    is_shorter = True
    while is_shorter:
        is_shorter = False
        for visit in _critical(plan):
            if budget.steps <= 0:
                return plan
            larger = _kept(plan, visit)
            if larger.step_seconds < plan.step_seconds and max(budget.excess(larger))[0] <= 0:
                plan, is_shorter = larger, True
    return plan


def _alive(plan: PipelinePlan, rank: int, place: int) -> Iterator[Visit]:
    """The visits that hold blocks which could be dropped, during the action at ``place`` in the order of ``rank``."""
    order = plan.schedule.ranks[rank]
    begun = {(stage, i) for stage, kind, i in order[: place + 1] if kind is Kind.FORWARD}
    for stage, kind, i in order[place:]:
        choice = plan.step.choice((stage, i))
        if kind in BACKWARDS and (stage, i) in begun and (choice.kept or choice.early):
            yield stage, i


def _critical(plan: PipelinePlan) -> list[Visit]:
    """The visits that recompute blocks late on the critical path."""
    path = critical_path(plan.schedule, plan.step.program, plan.step.run)
    actions = [event.action for event in path if isinstance(event, Event) and event.action.kind in BACKWARDS]
    return [action.visit for action in actions if plan.step.choice(action.visit).late]


def _dropped(plan: PipelinePlan, visit: Visit) -> PipelinePlan:
    """``plan`` with nothing of ``visit`` recomputed early, or, if nothing is, with one kept block less."""
    choice = plan.step.choice(visit)
    if choice.early:
        schedule = replace(plan.schedule, ranks=tuple(
            tuple(action for action in order if action != Action(visit[0], Kind.RECOMPUTE, visit[1]))
            for order in plan.schedule.ranks
        ))
        without_early = replace(choice, early=(), late=tuple(sorted((*choice.early, *choice.late))))
        return _with(replace(plan, schedule=schedule), visit, without_early)
    dropped = min(choice.kept, key=lambda block: density(plan.problem.stages[visit[0]].blocks[block]))
    kept = tuple(block for block in choice.kept if block != dropped)
    return _with(plan, visit, replace(choice, kept=kept, late=tuple(sorted((*choice.late, dropped)))))


def _kept(plan: PipelinePlan, visit: Visit) -> PipelinePlan:
    """``plan`` with one late block of ``visit`` kept."""
    choice = plan.step.choice(visit)
    kept = max(choice.late, key=lambda block: density(plan.problem.stages[visit[0]].blocks[block]))
    late = tuple(block for block in choice.late if block != kept)
    return _with(plan, visit, replace(choice, kept=tuple(sorted((*choice.kept, kept))), late=late))


def _with(plan: PipelinePlan, visit: Visit, choice: Choice) -> PipelinePlan:
    return PipelinePlan.of(plan.problem, plan.schedule, {**plan.choices, visit: choice})
