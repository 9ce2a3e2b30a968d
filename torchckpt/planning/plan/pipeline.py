"""Pipeline: which blocks of which visits are kept, and when the others are recomputed, under a byte budget.

The problem: the ranks of a pipeline have so many bytes for activations. The standard answer drops the same number of
layers on every stage for every micro-batch, and recomputes them when their gradient arrives. That leaves memory idle:
ranks hold different numbers of micro-batches, and at the end of a step fewer of them. Ours chooses for each block of
each visit, starts recomputes early where a rank would idle, and says beside it how short a step can be at all.

The problem has two parts. Bytes decide, rank by rank, which blocks can be kept (:mod:`lane`). The length of the step
then depends on all ranks together (:mod:`dispatch`). :mod:`candidates` alternates between the two, until the step
reaches the bound (:mod:`bound`) or a fixed number of tries is used up.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn

from torchckpt.errors import BudgetInfeasible, Fault, called
from torchckpt.planning.budget import Limit, enough, whole
from torchckpt.planning.order.schedule import Action, Schedule, Visit
from torchckpt.planning.plan.away import bound_seconds, planned_away
from torchckpt.planning.plan.figures import Alone
from torchckpt.planning.plan.problem import Problem, problem_of
from torchckpt.planning.plan.result import PipelinePlan
from torchckpt.planning.plan.search.candidates import Candidate, Search
from torchckpt.planning.plan.search.lane import RECOMPUTE, Holding
from torchckpt.planning.work.block import Links, Stages
from torchckpt.planning.work.choice import Choice, first_blocks
from torchckpt.planning.work.host import Host

__all__ = ["interruptible", "plan_bound", "plan_of", "plan_pipeline", "planned", "planned_with_moves"]

_ROUNDING = 1e-9


def plan_of(stop: KeyboardInterrupt) -> Any:
    """The best plan that was found for what was asked before ``stop``; None, if none was."""
    return vars(stop).get("plan")


@contextmanager
def interruptible(
    plans: list[PipelinePlan], as_asked: Callable[[PipelinePlan], Any] = lambda plan: plan
) -> Iterator[None]:
    """Have an interrupt carry the shortest of ``plans`` and of what it carries already, ``as_asked``. It stays what it
    is: Python ends a script by the signal for no subclass of KeyboardInterrupt."""
    try:
        yield
    except KeyboardInterrupt as stop:
        plans += [] if plan_of(stop) is None else [plan_of(stop)]
        vars(stop)["plan"] = as_asked(min(plans, key=lambda plan: plan.step_seconds)) if plans else None
        raise


def planned(problem: Problem) -> PipelinePlan:
    """The shortest plan that is found. BudgetInfeasible as of :func:`plan_pipeline`."""
    if problem.host is not None:
        return _beside_host(problem)
    if problem.too_small:
        _refuse(problem)
    kept = _everything_kept(problem)
    target = problem.bound_seconds
    if kept and kept.step_seconds <= target * (1 + _ROUNDING):
        return kept
    with interruptible(plans := [kept] if kept else []):
        search = Search(problem.program, problem.lanes, target, keep_all=kept is not None)
        try:
            plans.append(_plan(problem, search.run()))
        except KeyboardInterrupt:
            plans.append(_plan(problem, search.best))
            raise
    return min(plans, key=lambda plan: plan.step_seconds)


def _beside_host(problem: Problem) -> PipelinePlan:
    """The shortest of the plans that send blocks away and of those that do not."""
    alone = replace(problem, host=None)
    plans: list[PipelinePlan] = []
    with interruptible(plans, lambda plan: replace(plan, problem=problem)):
        if not alone.too_small:
            plans.append(replace(planned(alone), problem=problem))
        away, offloading = planned_away(problem)
    recomputing = plans[0].step_seconds if plans else math.inf
    if away is not None:
        schedule, choices, moves = away
        plans.append(PipelinePlan(problem, schedule, choices, moves=moves))
    if not plans:
        _refuse(problem)
    best = min(plans, key=lambda plan: plan.step_seconds)
    return replace(best, alone=Alone(recomputing, offloading))


def _everything_kept(problem: Problem) -> PipelinePlan | None:
    """The schedule as it is, if the budget has room for it."""
    if any(peak > lane.budget_bytes for peak, lane in zip(problem.keep_all.peak_bytes, problem.lanes)):
        return None
    return PipelinePlan.of(problem, problem.schedule, first_blocks(problem.schedule, problem.stages, 0))


def _plan(problem: Problem, found: Candidate) -> PipelinePlan:
    ranks: list[tuple[Action, ...]] = []
    choices: dict[Visit, Choice] = {}
    for lane, done, holdings in zip(problem.lanes, found.step.done, found.chosen):
        early = {visit: blocks for kind, visit, blocks, _, _ in done if kind is RECOMPUTE}
        visits = ((kind, *lane.visits[visit]) for kind, visit, *_ in done)
        ranks.append(tuple(Action(stage, kind, i) for kind, stage, i in visits))
        counts = [early.get(visit, 0) for visit in range(len(holdings))]
        choices |= dict(zip(lane.visits, map(Holding.choice, holdings, counts)))
    return PipelinePlan.of(problem, replace(problem.schedule, ranks=tuple(ranks)), choices)


def _refuse(problem: Problem) -> NoReturn:
    """Raise the error for a budget, or a device, that is too small, with the least that works and its plan."""
    memory, static = problem.memory, problem.keep_all.static_bytes
    needs = problem.least_bytes if memory is None else problem.least_device_bytes
    given = problem.budget_bytes if memory is None else [memory.total_bytes] * len(static)
    rank = max(problem.too_small, key=lambda rank: needs[rank] / (given[rank] or 1.0))
    needed = [max(least, budget) for least, budget in zip(needs, given)]
    if len(set(given)) == 1:  # one for all
        needed = [max(needed)] * len(needed)
    others = [other for other in problem.too_small if other != rank]
    also = "; too little for " + ", ".join(f"rank {other}" for other in others) + ", too" if others else ""
    least, host = enough(needs[rank]), ""
    if problem.host is not None:
        host = f", and {whole(problem.host_bytes[rank])} bytes on its host do not make up for it"
    limit, taken, works = "budget", "", f"budget={least} or more, or"
    if needs[rank] < 1.0:  # as a number it would be refused
        share = math.ceil(1e4 * needs[rank] / max(problem.keep_all.peak_bytes)) / 100
        works = f'budget="{share:g}%" or more, or'
    if memory is not None:
        needed = [amount - of_rank for amount, of_rank in zip(needed, static)]
        limit, works = "device", f"DeviceMemory({least}) or more, more stages,"
        taken = f", of which parameters, gradients and optimizer state take {enough(static[rank])}"
    rule = f"the {limit} is too small: rank {rank} needs {least} bytes even if it recomputes everything{host}"
    received = f"{whole(given[rank])} bytes for rank {rank}{taken}{also}"
    fault = Fault(rule, received, f"{works} fewer micro-batches in flight, or smaller ones")
    with interruptible([], lambda plan: None):  # for more than was asked
        plan = planned(problem.within(needed))
    raise BudgetInfeasible(str(fault), needs[rank], plan, rank)


_PLANNED = 3
"""The number of partitions that are planned: those with the lowest bounds."""
_WORK = 200_000
"""The actions to bound in all: each bound of a partition takes all actions of its schedule."""


def planned_with_moves(problem: Problem) -> PipelinePlan:
    """The best plan of ``problem``, with blocks moved between its stages or not."""

    def as_asked(plan: PipelinePlan) -> PipelinePlan:
        return plan if plan.problem.stages == problem.stages else replace(plan, asked=problem)

    path = _path(problem)
    plans: list[PipelinePlan] = []
    with interruptible(plans, as_asked):
        for moved in dict.fromkeys([*path[-_PLANNED:], path[0]]):
            with suppress(BudgetInfeasible):
                plans.append(planned(moved))
    if not plans:
        return planned(problem)  # which says what is wrong
    return as_asked(min(plans, key=lambda plan: plan.step_seconds))


def _path(problem: Problem) -> list[Problem]:
    """A list of partitions that starts with ``problem``. Each has a lower bound than the one before."""
    path, left, lowest = [problem], _WORK, bound_seconds(problem)
    size = sum(map(len, problem.lanes))
    while left > 0:
        best = path[-1]
        for counts in _moves([len(stage.blocks) for stage in path[-1].stages]):
            other = problem.restaged(counts)
            if (seconds := bound_seconds(other)) < lowest * (1 - _ROUNDING):
                best, lowest = other, seconds
            left -= size
            if left <= 0:
                break
        if best is path[-1]:
            break
        path.append(best)
    return path


def _moves(counts: Sequence[int]) -> Iterator[list[int]]:
    """All counts after one block has moved to another stage. Every stage keeps at least one block."""
    for give, few in enumerate(counts):
        for take in range(len(counts)):
            if take != give and few > 1:
                moved = list(counts)
                moved[give] -= 1
                moved[take] += 1
                yield moved


@called("plan_pipeline()")
def plan_pipeline(
    schedule: Schedule,
    stages: Stages,
    budget: Limit,
    link: Links = 0.0,
    *,
    balance: bool = False,
    host: Host | None = None,
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
        host: memory beside the devices to which blocks may be sent, and the link to it, such as
            ``Host("200GiB", out="25GB")``. Default: none.

    Raises:
        ArgumentError: an argument is wrong.
        BudgetInfeasible: the budget, or the device, is below the need of a rank that recomputes everything, and the
            host cannot make up for it. The error has a budget, or a device memory, that works, and its plan.
    """
    problem = problem_of(schedule, stages, budget, link, host)
    return planned_with_moves(problem) if balance else planned(problem)


@called("plan_bound()")
def plan_bound(
    schedule: Schedule, stages: Stages, budget: Limit, link: Links = 0.0, *, host: Host | None = None
) -> float:
    """A lower bound on the seconds of every plan; infinite if no plan fits. Arguments as of `plan_pipeline`."""
    return bound_seconds(problem_of(schedule, stages, budget, link, host))
