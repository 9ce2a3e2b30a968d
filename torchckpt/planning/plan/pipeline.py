"""Pipeline: which blocks of which visits are kept, and when the others are recomputed, under a byte budget.

The problem: the ranks of a pipeline have so many bytes for activations. The standard answer drops the same number of
layers on every stage for every micro-batch, and recomputes them when their gradient arrives. That leaves memory idle:
ranks hold different numbers of micro-batches, and at the end of a step fewer of them. Ours chooses for each block of
each visit, starts recomputes early where a rank would idle, and says beside it how short a step can be at all.

The problem has two parts. Bytes decide, rank by rank, which blocks can be kept (:mod:`lane`). The length of the step
then depends on all ranks together (:mod:`dispatch`). :mod:`search` alternates between the two, until the step reaches
the bound (:mod:`bound`) or a fixed number of tries is used up.
"""
from __future__ import annotations

from torchckpt.planning.budget import Limit
from torchckpt.planning.order.schedule import Schedule
from torchckpt.planning.plan.balance import planned_with_moves
from torchckpt.planning.plan.problem import problem_of
from torchckpt.planning.plan.result import PipelinePlan
from torchckpt.planning.plan.solve import planned
from torchckpt.planning.work.inputs import Links, Stages

__all__ = ["plan_bound", "plan_pipeline"]


def plan_pipeline(
    schedule: Schedule, stages: Stages, budget: Limit, link: Links = 0.0, *, balance: bool = False
) -> PipelinePlan:
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
        link: seconds of a message, or the links of :func:`~torchckpt.planning.step.simulated.simulate`.

        balance: also move blocks between stages, each with its parameters, where that makes the step shorter.

    Raises:
        ArgumentError: an argument is wrong.
        BudgetInfeasible: the budget is below the need of a rank that recomputes everything. The error has the least
            budget that works, and its plan.
    """
    problem = problem_of("plan_pipeline()", schedule, stages, budget, link)
    return planned_with_moves(problem) if balance else planned(problem)


def plan_bound(schedule: Schedule, stages: Stages, budget: Limit, link: Links = 0.0) -> float:
    """A lower bound on the seconds of every plan; infinite if no plan fits. Arguments as of `plan_pipeline`."""
    return problem_of("plan_bound()", schedule, stages, budget, link).bound_seconds
