"""Stored: a plan as JSON, and back."""
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NoReturn

from torchckpt.errors import ArgumentError, Fault
from torchckpt.model.plan.figures import PlanFigures
from torchckpt.model.plan.problem import Problem, problem_of
from torchckpt.model.plan.search.replay import Choice, Choices
from torchckpt.model.plan.stage.stage import Block, Fixed, Stage, restaged
from torchckpt.model.schedule.costs import Link
from torchckpt.model.schedule.csv_format import from_csv, to_csv
from torchckpt.model.schedule.schedule import Schedule

__all__ = ["read", "written"]

_FORMAT = 1
_CALLER = "PipelinePlan.from_json()"


def written(plan: PlanFigures) -> str:
    """The plan as JSON: the problem, the order of each rank, and the choices for each visit."""
    problem = plan.problem
    stored = {
        "format": _FORMAT,
        "schedule": problem.schedule.name,
        "given": to_csv(problem.schedule),
        "planned": to_csv(plan.schedule),
        "stages": [asdict(stage) for stage in (plan.asked or problem).stages],
        "balance": plan.balance,
        "links": [[link.latency_seconds, link.bandwidth] for link in problem.links],
        "budget_bytes": problem.budget_bytes,
        "bound_seconds": plan.bound_seconds,
        "choices": [_choices_of(plan, stage) for stage in range(len(problem.stages))],
    }
    return json.dumps(stored)


def read(text: str) -> tuple[Problem, Schedule, Choices, float, Problem | None]:
    """Read the JSON of :func:`written`.

    Raises:
        ArgumentError: the text has another format, or its parts contradict each other.
    """
    try:
        stored = json.loads(text)
        if stored["format"] != _FORMAT:
            _refuse(f"format {stored['format']}")
        ranks = len(stored["budget_bytes"])
        given, planned = (_schedule(stored[name], stored["schedule"], ranks) for name in ("given", "planned"))
        stages = [_stage(one) for one in stored["stages"]]
        links = [Link(*pair) for pair in stored["links"]]
        asked = problem_of(_CALLER, given, stages, stored["budget_bytes"], links)
        problem = replace(asked, stages=restaged(stages, stored["balance"]))
        choices = {
            (stage, i): Choice(*(tuple(part) for part in one))
            for stage, own in enumerate(stored["choices"])
            for i, one in enumerate(own)
        }
        _check(problem, planned, choices)
        bound = float(stored["bound_seconds"])
        return problem, planned, choices, bound, None if problem.stages == asked.stages else asked
    except ArgumentError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        _refuse(f"{type(error).__name__}: {error}")


def _refuse(received: str) -> NoReturn:
    rule = "a plan is read from what to_json() wrote"
    raise ArgumentError(f"{_CALLER}: {Fault(rule, received, 'plan.to_json()')}")


def _choices_of(plan: PlanFigures, stage: int) -> list[Sequence[Sequence[int]]]:
    own = (plan.choices[stage, i] for i in range(plan.schedule.micro_batches))
    return [(one.kept, one.early, one.late) for one in own]


def _schedule(text: str, name: str, ranks: int) -> Schedule:
    """The schedule of a CSV. Last ranks without actions are not in the CSV, and are added."""
    found = from_csv(text, name)
    return replace(found, ranks=(*found.ranks, *[()] * (ranks - len(found.ranks))))


def _stage(stored: dict[str, Any]) -> Stage:
    before, after = Fixed(**stored["before"]), Fixed(**stored["after"])
    return Stage(tuple(Block(**block) for block in stored["blocks"]), before, after, stored["message_bytes"])


def _check(problem: Problem, planned: Schedule, choices: Choices) -> None:
    """Refuse unless the choices are for every block of every visit."""
    if planned.placement != problem.schedule.placement or planned.micro_batches != problem.schedule.micro_batches:
        _refuse("the planned schedule has other stages, ranks or micro-batches")
    for stage, own in enumerate(problem.stages):
        for i in range(planned.micro_batches):
            choice = choices[stage, i]
            if sorted((*choice.kept, *choice.early, *choice.late)) != list(range(len(own.blocks))):
                _refuse(f"choices of stage {stage}, micro-batch {i}")
