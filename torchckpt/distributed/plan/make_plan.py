"""Make plan: rank 0 makes the plan from the measurements of all processes, and sends it to all."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist

from torchckpt.distributed.plan.agreement import all_gather, broadcast, check_the_same, digest_of
from torchckpt.distributed.plan.stage_parts import Parts, stage_of
from torchckpt.distributed.record import Gathered
from torchckpt.errors import ArgumentError, BudgetInfeasible, CheckpointError, Fault, raise_faults
from torchckpt.model import Action, Kind, Schedule
from torchckpt.model.plan import Choice, PipelinePlan, Stage
from torchckpt.model.plan.run.extra_memory import MeasuredStep
from torchckpt.model.plan.run.fit_measured import Fitted, fitted
from torchckpt.model.plan.search.replay import Level
from torchckpt.model.plan.stage.limit import Bytes

__all__ = ["Costs", "made"]

_CALLER = "recompute_ahead()"
_NO_REGIONS = Fault(
    "with a budget, at least one stage must have regions: only regions are recomputed",
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
    taken: Mapping[Action, Level]
    """The bytes of each action, beyond those allocated before the step."""
    tied: bool = False
    """Whether stages of this process share parameters."""


@dataclass(frozen=True)
class _Outcome:
    """The result that rank 0 sends to the others, made of types that can be sent."""

    plan: str
    budget_bytes: tuple[float, ...] = ()
    peak_bytes: tuple[float, ...] = ()
    refusal: str = ""
    least_bytes: float = 0.0
    rank: int | None = None


def made(schedule: Schedule, budget: Bytes, measured: Gathered, costs: Costs) -> Fitted:
    """Make the plan. Collective: all processes of the job must call it, and all get the same plan.

    Args:
        schedule: the schedule without recompute actions.
        measured: the combined records of steps that recomputed all regions.
        costs: the measurements of this process.

    Raises:
        ArgumentError, BudgetInfeasible, ScheduleError: on every rank.
    """
    said = all_gather((repr(budget), costs))
    check_the_same("budget", [text for text, _ in said])
    outcome = None
    if not dist.get_rank():
        outcome = _outcome(schedule, budget, measured, [own for _, own in said])
    outcome = broadcast(outcome)
    if outcome.refusal:
        _refuse(outcome)
    plan = PipelinePlan.from_json(outcome.plan)
    check_the_same("plan", all_gather(digest_of(plan)))
    return Fitted(plan, outcome.budget_bytes, outcome.peak_bytes)


def _outcome(schedule: Schedule, budget: Bytes, measured: Gathered, costs: Sequence[Costs]) -> _Outcome:
    try:
        stages = [_stage(stage, measured, costs) for stage in range(schedule.stages)]
        raise_faults(_CALLER, [] if any(stage.blocks for stage in stages) else [_NO_REGIONS])
        took, tied = _took(measured.schedule, stages, costs), any(own.tied for own in costs)
        found = fitted(_CALLER, schedule, stages, measured.links, budget, took, tied)
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
    return stage_of(parts, measured.costs[stage], seconds)


def _took(schedule: Schedule, stages: Sequence[Stage], costs: Sequence[Costs]) -> MeasuredStep:
    """The step in which the bytes were measured, and what each of its actions took."""
    taken: dict[Action, Level] = {}
    for own in costs:
        taken = {**own.taken, **taken}  # the first replica of the pipeline wins
    split = {(stage, i) for order in schedule.ranks for stage, kind, i in order if kind is Kind.INPUT_GRAD}
    every = [tuple(range(len(stage.blocks))) for stage in stages]
    visits = ((stage, i) for stage in range(schedule.stages) for i in range(schedule.micro_batches))
    choices = {
        (stage, i): Choice((), every[stage], ()) if (stage, i) in split else Choice((), (), every[stage])
        for stage, i in visits
    }
    return MeasuredStep(schedule, choices, taken)
