"""Solve: find the shortest plan of a problem, or raise an error that says why there is none."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchckpt.errors import BudgetInfeasible
from torchckpt.planning.budget import enough, whole
from torchckpt.planning.order.orders import Visit
from torchckpt.planning.order.schedule import Action, Kind
from torchckpt.planning.plan.problem import Problem
from torchckpt.planning.plan.result import PipelinePlan
from torchckpt.planning.plan.search.candidates import search
from torchckpt.planning.plan.search.dispatch import RECOMPUTE, WEIGHT_GRAD, SimulatedStep
from torchckpt.planning.plan.search.holding import Holding
from torchckpt.planning.plan.search.lane import BACKWARD, FORWARD, INPUT_GRAD
from torchckpt.planning.work.choice import Choice, first_blocks

__all__ = ["planned"]

_KINDS = {
    FORWARD: Kind.FORWARD,
    BACKWARD: Kind.BACKWARD,
    INPUT_GRAD: Kind.INPUT_GRAD,
    WEIGHT_GRAD: Kind.WEIGHT_GRAD,
    RECOMPUTE: Kind.RECOMPUTE,
}
_ROUNDING = 1e-9


def planned(problem: Problem) -> PipelinePlan:
    """The shortest plan that is found.

    Raises:
        BudgetInfeasible: the budget is below the need of a rank that recomputes everything. The error has the least
            budget that works, and its plan.
    """
    if problem.too_small:
        _refuse(problem)
    kept = _everything_kept(problem)
    target = problem.bound_seconds
    if kept and kept.step_seconds <= target * (1 + _ROUNDING):
        return kept
    found = search(problem.program, problem.lanes, target, keep_all=kept is not None)
    plan = _plan(problem, found.step, found.held)
    return kept if kept and kept.step_seconds <= plan.step_seconds else plan


def _everything_kept(problem: Problem) -> PipelinePlan | None:
    """The schedule as it is, if the budget has room for it."""
    pairs = zip(problem.keep_all.peak_bytes, problem.lanes)
    if any(peak > lane.budget_bytes for peak, lane in pairs):
        return None
    return PipelinePlan.of(problem, problem.schedule, first_blocks(problem.schedule, problem.stages, 0))


def _plan(problem: Problem, step: SimulatedStep, held: Sequence[Sequence[Holding]]) -> PipelinePlan:
    ranks: list[tuple[Action, ...]] = []
    choices: dict[Visit, Choice] = {}
    for lane, done, own in zip(problem.lanes, step.done, held):
        early = [0] * len(own)
        for kind, visit, blocks, _, _ in done:
            if kind == RECOMPUTE:
                early[visit] = blocks
        ranks.append(tuple(Action(lane.visits[at][0], _KINDS[kind], lane.visits[at][1]) for kind, at, *_ in done))
        choices |= {visit: _choice(one, count) for visit, one, count in zip(lane.visits, own, early)}
    return PipelinePlan.of(problem, replace(problem.schedule, ranks=tuple(ranks)), choices)


def _choice(held: Holding, early: int) -> Choice:
    dropped = held.dropped
    kept = tuple(at for at in range(held.kept + len(dropped)) if at not in dropped)
    late = len(dropped) - early
    return Choice(kept, dropped[late:], dropped[:late])


def _refuse(problem: Problem) -> None:
    """Raise the error for a budget that is too small, with the least budget that works and its plan."""
    rank = max(problem.too_small, key=lambda one: problem.least_bytes[one] / problem.budget_bytes[one])
    least = problem.least_bytes[rank]
    needed = [max(least, budget) for least, budget in zip(problem.least_bytes, problem.budget_bytes)]
    if len(set(problem.budget_bytes)) == 1:  # one for all
        needed = [max(needed)] * len(needed)
    others = [one for one in problem.too_small if one != rank]
    also = f"; too little for ranks {', '.join(map(str, others))}, too" if others else ""
    raise BudgetInfeasible(
        "plan_pipeline(): a budget holds what a rank that recomputes everything needs\n"
        f"  received: {whole(problem.budget_bytes[rank])} bytes for rank {rank}, which needs {enough(least)}{also}\n"
        f"  works:    budget={enough(least)} or more, or fewer micro-batches in flight, or smaller ones",
        least,
        planned(problem.within(needed)),
        rank,
    )
