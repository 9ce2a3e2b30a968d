"""Fit measured: a plan for a budget that covers all memory of a step, not only the activations.

A measured step shows, for each action, the bytes of gradients, messages in transit, losses, and temporary memory. The
planner gets the rest of the budget for activations. These bytes are not all alive at once, so several reserves for them
are tried; the shortest plan that fits the whole budget is returned.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchckpt.errors import BudgetInfeasible
from torchckpt.model.plan.pipeline import plan_pipeline
from torchckpt.model.plan.problem import Problem, keep_all, problem_of
from torchckpt.model.plan.result import PipelinePlan
from torchckpt.model.plan.run.extra_memory import ExtraMemory, MeasuredStep, peak_bytes
from torchckpt.model.plan.run.gradient_sums import summed_as_given
from torchckpt.model.plan.search.replay import first_dropped
from torchckpt.model.plan.solve import planned
from torchckpt.model.plan.stage.limit import Bytes, bytes_per_rank
from torchckpt.model.plan.stage.stage import Stage
from torchckpt.model.schedule.action import Action
from torchckpt.model.schedule.costs import Link
from torchckpt.model.schedule.schedule import Schedule

__all__ = ["Fitted", "fitted"]

_SHARES = (1.0, 0.5, 0.25, 0.0)
_ROUNDING = 1e-9
_LEAST_BYTES = 1.0
"""A budget is above zero."""


@dataclass(frozen=True)
class Fitted:
    """A plan, and the peak bytes of a step of it."""

    plan: PipelinePlan
    budget_bytes: tuple[float, ...]
    """The budget of each rank."""
    peak_bytes: tuple[float, ...]
    """The peak of each rank, with its extra memory."""

    @property
    def fits(self) -> bool:
        return all(peak <= limit * (1 + _ROUNDING) for peak, limit in zip(self.peak_bytes, self.budget_bytes))


def fitted(
    caller: str, schedule: Schedule, stages: Sequence[Stage], links: Sequence[Link], budget: Bytes, took: MeasuredStep,
    tied: bool = False,
) -> Fitted:
    """The shortest plan found whose step takes at most ``budget`` bytes. A share is a share of the peak of a step that
    keeps everything.

    Args:
        tied: whether stages of a rank share parameters. Default: False.

    Raises:
        ArgumentError: ``budget`` is not a valid budget.
        BudgetInfeasible: the budget is below the peak of a step that recomputes everything.
    """
    beside = took.beside(stages)
    least, most = took.least(stages), took.most(stages)
    everything = keep_all(schedule, stages, links).peak_bytes
    limits = bytes_per_rank(caller, budget, len(schedule.ranks), max(map(sum, zip(everything, least))))
    best: Fitted | None = None
    for share in _SHARES if most != least else (0.0,):
        reserve = [low + share * (high - low) for low, high in zip(least, most)]
        within = [max(_LEAST_BYTES, limit - own) for limit, own in zip(limits, reserve)]
        try:
            plan = summed_as_given(plan_pipeline(schedule, stages, within, links), tied)
        except BudgetInfeasible as error:
            if share == 0.0 and best is None:
                raise _infeasible(caller, error, limits, least) from error
            continue
        found = Fitted(plan, limits, _peaks(plan, beside))
        if found.fits and (best is None or plan.step_seconds < best.plan.step_seconds):
            best = found
    return best or _with_least(problem_of(caller, schedule, stages, "100%", links), limits, beside, caller, tied)


def _peaks(plan: PipelinePlan, beside: Mapping[Action, ExtraMemory]) -> tuple[float, ...]:
    """The peak bytes of each rank in a step of ``plan``."""
    return tuple(peak_bytes(order, plan.problem.stages, plan.choices, beside) for order in plan.schedule.ranks)


def _with_least(
    problem: Problem, limits: tuple[float, ...], beside: Mapping[Action, ExtraMemory], caller: str, tied: bool
) -> Fitted:
    """A plan that recomputes everything, if no other one fits.

    It tries the order of the planner, and the order that was measured.

    Raises:
        BudgetInfeasible: neither fits.
    """
    within = problem.within([max(_LEAST_BYTES, least) for least in problem.least_bytes])
    most = max(len(stage.blocks) for stage in problem.stages)
    all_late = PipelinePlan.of(within, problem.schedule, first_dropped(problem.schedule, problem.stages, most))
    plans = summed_as_given(planned(within), tied), all_late
    found = [Fitted(plan, limits, _peaks(plan, beside)) for plan in plans]
    best = min(found, key=lambda one: max(peak / limit for peak, limit in zip(one.peak_bytes, limits)))
    if best.fits:
        return best
    rank = max(range(len(limits)), key=lambda one: best.peak_bytes[one] / limits[one])
    needed = best.peak_bytes[rank]
    raise BudgetInfeasible(_too_small(caller, limits[rank], rank, needed), needed, best.plan, rank)


def _infeasible(
    caller: str, error: BudgetInfeasible, limits: Sequence[float], beside: Sequence[float]
) -> BudgetInfeasible:
    rank = error.rank or 0
    least = error.least_bytes + beside[rank]
    return BudgetInfeasible(_too_small(caller, limits[rank], rank, least), least, error.plan, rank)


def _too_small(caller: str, limit: float, rank: int, least: float) -> str:
    return (
        f"{caller}: a budget holds what a step takes that recomputes everything\n"
        f"  received: {limit:.12g} bytes for rank {rank}, which takes {math.ceil(least)}\n"
        f"  works:    budget={math.ceil(least)} or more, or fewer micro-batches in flight, or smaller ones"
    )
