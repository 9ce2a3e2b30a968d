"""Make plan: rank 0 makes the plan from the measurements of all processes, and sends it to all."""
from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch.distributed as dist

from torchckpt.distributed.meeting import all_gather, broadcast, check_the_same
from torchckpt.distributed.record import Gathered
from torchckpt.errors import ArgumentError, BudgetInfeasible, CheckpointError, Fault, called, check
from torchckpt.planning import Action, Schedule, State, arrival
from torchckpt.planning.budget import Bytes
from torchckpt.planning.plan import PipelinePlan
from torchckpt.planning.plan.figures import WholeStep
from torchckpt.planning.plan.run.extra_memory import MeasuredStep
from torchckpt.planning.plan.run.fit_measured import Fitted, fitted
from torchckpt.planning.step.memory import Level
from torchckpt.planning.step.placement import recomputed_early

__all__ = ["digest_of", "made"]

_CALLER = "recompute_ahead()"
_NO_REGIONS = Fault(
    "no stage has regions, so nothing can be recomputed to meet the budget",
    "stages whose forwards entered none",
    "for block in stage_module.layers: torchckpt.checkpoint_module(block)",
)


@dataclass(frozen=True)
class _Outcome:
    """The result that rank 0 sends to the others, made of types that can be sent."""

    plan: str
    budget_bytes: tuple[float, ...] = ()
    peak_bytes: tuple[float, ...] = ()
    refusal: str = ""
    least_bytes: float = 0.0
    rank: int | None = None


def digest_of(plan: PipelinePlan) -> str:
    """A short text that is equal for equal plans."""
    return hashlib.sha256(plan.to_json().encode()).hexdigest()[:16]


def made(
    schedule: Schedule, budget: Bytes, measured: Gathered, counted: Sequence[tuple[Schedule, Mapping[Action, Level]]],
    tied: bool, pairs: Collection[tuple[Action, Action]],
) -> Fitted:
    """Make the plan. Collective: all processes of the job must call it, and all get the same plan.

    Args:
        schedule: the schedule without recompute actions.
        measured: the combined records of steps that recomputed all regions.
        counted: the orders of the steps in which bytes were counted, first that with whole backwards; and the bytes of
            this process's actions in each, beyond those allocated before the step.
        tied: whether stages of some process share parameters.
        pairs: actions that torch runs as one where the second follows the first.

    Raises:
        ArgumentError, BudgetInfeasible, ScheduleError: on every rank.
    """
    levels_of_processes = all_gather([levels for _, levels in counted])
    outcome = None
    if not dist.get_rank():
        orders = [order for order, _ in counted]
        outcome = _outcome(schedule, budget, measured, orders, levels_of_processes, tied, pairs)
    outcome = broadcast(outcome)
    if outcome.refusal:
        _refuse(outcome)
    plan = PipelinePlan.from_json(outcome.plan)
    digests = all_gather(digest_of(plan))
    check_the_same("plan", digests, digests)
    whole = WholeStep(outcome.budget_bytes, outcome.peak_bytes)
    return Fitted(replace(plan, whole_step=whole), *whole)


def _outcome(
    schedule: Schedule, budget: Bytes, measured: Gathered, orders: Sequence[Schedule],
    levels_of_processes: Sequence[Sequence[Mapping[Action, Level]]], tied: bool,
    pairs: Collection[tuple[Action, Action]],
) -> _Outcome:
    stages, links = measured.step.stages, measured.step.links
    try:
        steps = [_measured_step(*step) for step in zip(orders, zip(*levels_of_processes))]
        with called(_CALLER):
            check([] if any(stage.blocks for stage in stages) else [_NO_REGIONS])
            fit = fitted(schedule, stages, links, budget, steps, tied, pairs)
    except BudgetInfeasible as error:
        plan = error.plan.to_json() if isinstance(error.plan, PipelinePlan) else ""
        return _Outcome(plan, refusal=str(error), least_bytes=error.least_bytes, rank=error.rank)
    except CheckpointError as error:
        return _Outcome("", refusal=str(error))
    except Exception as error:  # send it on: the other ranks wait for an answer
        return _Outcome("", refusal=f"{_CALLER}: rank 0 could not make the plan\n"
                        f"  received: {type(error).__name__}: {error}\n"
                        "  works:    plan=plan_pipeline(...), made in a process of its own")
    return _Outcome(fit.plan.to_json(), fit.budget_bytes, fit.peak_bytes)


def _refuse(outcome: _Outcome) -> NoReturn:
    if not outcome.plan:
        raise ArgumentError(outcome.refusal)
    plan = PipelinePlan.from_json(outcome.plan)
    raise BudgetInfeasible(outcome.refusal, outcome.least_bytes, plan, outcome.rank)


def _measured_step(order: Schedule, each: Sequence[Mapping[Action, Level]]) -> MeasuredStep:
    """A step in which bytes were counted; ``each`` has those of its actions, by process."""
    levels: dict[Action, Level] = {}
    for levels_of_process in each:
        levels = {**levels_of_process, **levels}  # the first replica of the pipeline wins
    return MeasuredStep(order, {**arrival(order), **dict.fromkeys(recomputed_early(order), State.EARLY)}, levels)
