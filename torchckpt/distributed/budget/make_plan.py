"""Make plan: rank 0 makes the plan from the measurements of all processes, and sends it to all."""
from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch.distributed as dist

from torchckpt.distributed.budget.stage_parts import Parts, stage_of
from torchckpt.distributed.meeting import all_gather, broadcast, check_the_same
from torchckpt.distributed.record import Gathered
from torchckpt.errors import ArgumentError, BudgetInfeasible, CheckpointError, Fault, called, check
from torchckpt.planning import Action, Schedule, Stage, State, arrival
from torchckpt.planning.budget import Bytes
from torchckpt.planning.plan import PipelinePlan
from torchckpt.planning.plan.figures import WholeStep
from torchckpt.planning.plan.run.extra_memory import MeasuredStep
from torchckpt.planning.plan.run.fit_measured import Fitted, fitted
from torchckpt.planning.step.memory import Level
from torchckpt.planning.step.placement import recomputed_early

__all__ = ["Costs", "digest_of", "made"]

_CALLER = "recompute_ahead()"
_NO_REGIONS = Fault(
    "no stage has regions, so nothing can be recomputed to meet the budget",
    "stages whose forwards entered none",
    "for block in stage_module.layers: torchckpt.checkpoint_module(block)",
)


@dataclass(frozen=True)
class Costs:
    """The measurements of one process."""

    parts: Mapping[int, Parts]
    """The bytes of each stage."""
    seconds: Mapping[int, Mapping[int, float]]
    """The seconds of the replay of each region, by stage and region."""
    taken: Sequence[Mapping[Action, Level]]
    """Of each step in which bytes were counted, those of each action, beyond those allocated before the step."""


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
    return hashlib.sha256(plan.to_json().encode()).hexdigest()[:16]


def made(
    schedule: Schedule, budget: Bytes, measured: Gathered, counted: Sequence[Schedule], costs: Costs, tied: bool,
    pairs: Collection[tuple[Action, Action]],
) -> Fitted:
    """Make the plan. Collective: all processes of the job must call it, and all get the same plan.

    Args:
        schedule: the schedule without recompute actions.
        measured: the combined records of steps that recomputed all regions.
        counted: the orders of the steps in which bytes were counted; first that with whole backwards.
        costs: the measurements of this process.
        tied: whether stages of some process share parameters.
        pairs: actions that torch runs as one where the second follows the first.

    Raises:
        ArgumentError, BudgetInfeasible, ScheduleError: on every rank.
    """
    said = all_gather(costs)
    outcome = None
    if not dist.get_rank():
        outcome = _outcome(schedule, budget, measured, counted, said, tied, pairs)
    outcome = broadcast(outcome)
    if outcome.refusal:
        _refuse(outcome)
    plan = PipelinePlan.from_json(outcome.plan)
    digests = all_gather(digest_of(plan))
    check_the_same("plan", digests, digests)
    whole = WholeStep(outcome.budget_bytes, outcome.peak_bytes)
    return Fitted(replace(plan, whole_step=whole), *whole)


def _outcome(
    schedule: Schedule, budget: Bytes, measured: Gathered, counted: Sequence[Schedule], costs: Sequence[Costs],
    tied: bool, pairs: Collection[tuple[Action, Action]],
) -> _Outcome:
    try:
        stages = [_stage(stage, measured, costs) for stage in range(schedule.stages)]
        took = [_took(order, stages, [own.taken[at] for own in costs]) for at, order in enumerate(counted)]
        with called(_CALLER):
            check([] if any(stage.blocks for stage in stages) else [_NO_REGIONS])
            found = fitted(schedule, stages, measured.step.links, budget, took, tied, pairs)
    except BudgetInfeasible as error:
        plan = error.plan.to_json() if isinstance(error.plan, PipelinePlan) else ""
        return _Outcome(plan, refusal=str(error), least_bytes=error.least_bytes, rank=error.rank)
    except CheckpointError as error:
        return _Outcome("", refusal=str(error))
    except Exception as error:  # send it on: the other ranks wait for an answer
        return _Outcome("", refusal=f"{_CALLER}: rank 0 could not make the plan\n"
                        f"  received: {type(error).__name__}: {error}\n"
                        "  works:    plan=plan_pipeline(...), made in a process of its own")
    return _Outcome(found.plan.to_json(), found.budget_bytes, found.peak_bytes)


def _refuse(outcome: _Outcome) -> NoReturn:
    if not outcome.plan:
        raise ArgumentError(outcome.refusal)
    plan = PipelinePlan.from_json(outcome.plan)
    raise BudgetInfeasible(outcome.refusal, outcome.least_bytes, plan, outcome.rank)


def _stage(stage: int, measured: Gathered, costs: Sequence[Costs]) -> Stage:
    """The stage as measured. If the pipeline has replicas, the measurements of the first one count."""
    parts = next(own.parts[stage] for own in costs if stage in own.parts)
    seconds = next((own.seconds[stage] for own in costs if stage in own.seconds), {})
    return stage_of(parts, measured.step.stages[stage], seconds)


def _took(order: Schedule, stages: Sequence[Stage], each: Sequence[Mapping[Action, Level]]) -> MeasuredStep:
    """A step in which bytes were counted; ``each`` has what its actions took, by process."""
    taken: dict[Action, Level] = {}
    for own in each:
        taken = {**own, **taken}  # the first replica of the pipeline wins
    return MeasuredStep(order, {**arrival(order), **dict.fromkeys(recomputed_early(order), State.EARLY)}, taken)
