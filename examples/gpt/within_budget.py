"""Within a budget: the same steps recomputing all at arrival, the same blocks of all stages, and as planned."""
from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchckpt.model.draw.units import Units, aligned
from torchckpt.model.plan import Choice, PipelinePlan

from .side_by_side import Course, is_equal

if TYPE_CHECKING:
    from train_gpt_distributed import Trainer

__all__ = ["show_planned"]

FIRST = 6  # four that are measured, and two of the plan: its bytes are counted in the second
UNITS = Units("ms", 1e-3, "MB", 1e6)


def show_planned(build: Callable[..., Trainer], budget: str, steps: int, path: Path) -> None:
    """Let all make the same steps. The process of the last stage prints what came of it, and draws the plan."""
    planned = Course("planned", build("ahead", budget=budget))
    for step in range(FIRST):
        stepped(planned, step)
    plan = planned.trainer.schedule.plan
    few = plan.same_recomputed.blocks
    every = max(plan.balance)
    rules = [
        Course("recompute all", build("ahead", plan=the_first(every, plan))),
        Course(f"the same {few} of all stages", build("ahead", plan=the_first(few, plan))),
    ]
    for rule in rules:
        for step in range(FIRST):
            stepped(rule, step)
    courses = [*rules, planned]
    for step in range(FIRST, FIRST + steps):  # in turns, so that whatever else the machine does slows each alike
        for course in courses:
            stepped(course, step)
    equal = [is_equal(course, planned) for course in courses]
    reports = [course.trainer.schedule.report() for course in courses]
    if planned.losses:
        print(f"{table(courses, reports, equal)}\n\n{reports[-1]}\n", flush=True)
    if not all(equal):
        sys.exit("Losses or parameters differ: the plan has changed the training.")
    if planned.losses:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(plan.draw(), encoding="utf-8")
        last = reports[-1]
        peak, limit = (UNITS.of_memory(max(each)) for each in (last.measured_peak_bytes, last.budget_bytes))
        print("The plan changed no bit of the losses and parameters.")
        print(f"It took {peak} at most, of {limit}. The picture of the plan is {path}")


def stepped(course: Course, step: int) -> None:
    torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
    course.step()


def the_first(few: int, plan: PipelinePlan) -> PipelinePlan:
    """The first blocks of every stage are recomputed inside the backward, and the others are kept."""
    each = [tuple(range(len(stage.blocks))) for stage in plan.problem.stages]
    choices = {(stage, i): Choice(each[stage][few:], (), each[stage][:few]) for stage, i in plan.choices}
    return PipelinePlan.of(plan.problem, plan.problem.schedule, choices)


def table(courses: list[Course], reports: list[Any], equal: list[bool]) -> str:
    rows: list[tuple[str, ...]] = [("", *(course.name for course in courses))]
    rows.append(("loss of the last step", *(f"{course.losses[-1]:.8f}" for course in courses)))
    rows.append(("parameters bit-equal", *("yes" if same else "NO" for same in equal)))
    seconds = [statistics.median(course.seconds[FIRST:]) for course in courses]
    rows.append(("a step, median", *map(UNITS.of_time, seconds)))
    rows.append(("by the plan", *(UNITS.of_time(report.plan.step_seconds) for report in reports)))
    rows.append(("bound", *(UNITS.of_time(reports[-1].plan.bound_seconds) for _ in courses)))
    for rank in range(len(reports[-1].budget_bytes)):
        peaks = [UNITS.of_memory(report.measured_peak_bytes[rank]) for report in reports]
        rows.append((f"peak of process {rank}", *peaks))
    return aligned(rows)
