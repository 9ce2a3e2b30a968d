"""Pipeline: which blocks of which visits are kept, and when the others are recomputed, under a byte budget.

The problem: the ranks of a pipeline have so many bytes for activations. The standard answer drops the same number of
layers on every stage for every micro-batch, and recomputes them when their gradient arrives. That leaves memory idle:
ranks hold different numbers of micro-batches, and at the end of a step fewer of them. Ours chooses for each block of
each visit, starts recomputes early where a rank would idle, and says beside it how short a step can be at all.

It comes apart. What can be kept is decided by bytes, rank by rank (:mod:`lane`); how long the step is then, couples
the ranks (:mod:`dispatch`). :mod:`search` goes back and forth between the two, until the step is as short as the bound
(:mod:`bound`), or for so many tries.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchckpt.errors import BudgetInfeasible
from torchckpt.model.action import Action, Kind
from torchckpt.model.orders import Visit
from torchckpt.model.plan.dispatch import RECOMPUTE, WEIGHT_GRAD, Played
from torchckpt.model.plan.holding import Holding
from torchckpt.model.plan.lane import BACKWARD, FORWARD, INPUT_GRAD
from torchckpt.model.plan.limit import Limit
from torchckpt.model.plan.problem import Links, Problem, problem_of
from torchckpt.model.plan.replay import Choice
from torchckpt.model.plan.result import PipelinePlan
from torchckpt.model.plan.search import search
from torchckpt.model.plan.stage import Stage
from torchckpt.model.schedule import Schedule

__all__ = ["plan_bound", "plan_pipeline", "planned"]

_KINDS = {
    FORWARD: Kind.FORWARD,
    BACKWARD: Kind.BACKWARD,
    INPUT_GRAD: Kind.INPUT_GRAD,
    WEIGHT_GRAD: Kind.WEIGHT_GRAD,
    RECOMPUTE: Kind.RECOMPUTE,
}
_ROUNDING = 1e-9


def plan_pipeline(schedule: Schedule, stages: Sequence[Stage], budget: Limit, link: Links = 0.0) -> PipelinePlan:
    """A short step of ``schedule`` whose ranks hold no more than ``budget``.

    >>> stages = [Stage((Block(boundary_bytes=0.06),) * 8)] * 4
    >>> plan = plan_pipeline(one_f_one_b(4, 8), stages, "50%")
    >>> plan.step_seconds, plan.bound_seconds, plan.keep_all_seconds
    (282.0, 282.0, 264.0)

    Args:
        schedule: the order of forwards and backwards, without recomputes. Weight gradients that are split off are
            moved; a split backward that has no room for all of its visit is done as a whole one.
        stages: what each stage consists of.
        budget: bytes for activations, of every rank or one for each: a number, a size such as ``"60GB"``, or ``"50%"``
            of the peak of the rank that holds most when everything is kept.
        link: seconds of a message, or the links of :func:`~torchckpt.model.simulator.simulate`.

    Raises:
        ArgumentError: an argument is wrong.
        BudgetInfeasible: below what a rank needs that recomputes everything; with the least that works, and its plan.
    """
    return planned(problem_of("plan_pipeline()", schedule, stages, budget, link))


def plan_bound(schedule: Schedule, stages: Sequence[Stage], budget: Limit, link: Links = 0.0) -> float:
    """Seconds that no plan goes below; infinite if the budget is below the least. Arguments as of `plan_pipeline`."""
    return problem_of("plan_bound()", schedule, stages, budget, link).bound_seconds


def planned(problem: Problem) -> PipelinePlan:
    """As :func:`plan_pipeline`, of what is checked."""
    if problem.too_small:
        _refuse(problem)
    kept = _everything_kept(problem)
    target = problem.bound_seconds
    if kept and kept.step_seconds <= target * (1 + _ROUNDING):
        return kept
    found = search(problem.program, problem.lanes, target, keep_all=kept is not None)
    plan = _plan(problem, found.played, found.held)
    return kept if kept and kept.step_seconds <= plan.step_seconds else plan


def _everything_kept(problem: Problem) -> PipelinePlan | None:
    """The schedule as it is, if the budget has room for it."""
    pairs = zip(problem.keep_all.peak_bytes, problem.lanes)
    if any(peak > lane.budget_bytes for peak, lane in pairs):
        return None
    every = [Choice(tuple(range(len(stage.blocks)))) for stage in problem.stages]
    visits = (visit for lane in problem.lanes for visit in lane.visits)
    return PipelinePlan.of(problem, problem.schedule, {visit: every[visit[0]] for visit in visits})


def _plan(problem: Problem, played: Played, held: Sequence[Sequence[Holding]]) -> PipelinePlan:
    ranks: list[tuple[Action, ...]] = []
    choices: dict[Visit, Choice] = {}
    for lane, done, own in zip(problem.lanes, played.done, held):
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
    """With the plan that the least budget allows."""
    rank = max(problem.too_small, key=lambda one: problem.least_bytes[one] / problem.budget_bytes[one])
    least = problem.least_bytes[rank]
    needed = [max(least, budget) for least, budget in zip(problem.least_bytes, problem.budget_bytes)]
    others = [one for one in problem.too_small if one != rank]
    also = f"; too little for ranks {', '.join(map(str, others))}, too" if others else ""
    raise BudgetInfeasible(
        "plan_pipeline(): a budget holds what a rank that recomputes everything needs\n"
        f"  received: {problem.budget_bytes[rank]:.12g} bytes for rank {rank}, which needs {least:.12g}{also}\n"
        f"  works:    budget={least:.12g} or more, or fewer micro-batches in flight, or smaller ones",
        least,
        planned(problem.within(needed)),
        rank,
    )
