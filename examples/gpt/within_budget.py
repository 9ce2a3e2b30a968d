"""Within a budget: the same steps recomputing all at arrival, the same blocks of all stages, and as planned."""
from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchckpt.planning import Choice
from torchckpt.planning.draw.svg import svg
from torchckpt.planning.draw.units import Units, aligned
from torchckpt.planning.plan import PipelinePlan

from .model import Size
from .side_by_side import Course, is_equal

if TYPE_CHECKING:
    from train_gpt_distributed import Trainer

__all__ = ["show_planned"]

FIRST = 6  # four that are measured, and two of the plan: its bytes are counted in the second
UNITS = Units("ms", 1e-3, "MB", 1e6, digits=3)  # as pictures have


def show_planned(build: Callable[..., Trainer], budget: str, steps: int, path: Path) -> None:
    """Let all make the same steps. The process of the last stage prints what came of it, and draws."""
    planned = Course("planned", build("ahead", budget=budget))
    for step in range(FIRST):
        stepped(planned, step)
    plan = planned.trainer.schedule.plan
    few = plan.same_recomputed.blocks
    every = max(plan.balance)
    rules = [
        Course("all blocks", build("ahead", plan=the_first(every, plan))),
        Course(f"the same {few} of each stage", build("ahead", plan=the_first(few, plan))),
    ]
    for rule in rules:
        for step in range(FIRST):
            stepped(rule, step)
    courses = [*rules, planned]
    for course in courses:
        course.report = course.trainer.schedule.report
    for step in range(FIRST, FIRST + steps):  # in turns, so that whatever else the machine does slows each alike
        for course in courses:
            stepped(course, step)
    equal = [is_equal(course, planned) for course in courses]
    reports = [course.typical() for course in courses]
    if planned.losses:
        stages = plan.by_stage(UNITS)
        said = (note(planned.trainer.size) + table(courses, reports, equal), stages, plan.summary)
        print("\n\n".join(said), end="\n\n", flush=True)
    if not all(equal):
        sys.exit("Losses or parameters differ: the plan has changed the training.")
    if planned.losses:
        draw(courses[-2].name, *reports[-2:], path)


def note(size: Size) -> str:
    """That blocks sleep, if they do."""
    milliseconds = size.block_seconds * 1e3
    if not milliseconds:
        return ""
    return (
        f"Blocks sleep {milliseconds:g} ms forward and {2 * milliseconds:g} ms backward, so that processes which share "
        "cores take the time of devices.\n\n"
    )


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
    rows.append(("a step, measured (median)", *(UNITS.of_time(report.measured.step_seconds) for report in reports)))
    rows.append(("by the plan", *(UNITS.of_time(report.plan.step_seconds) for report in reports)))
    rows.append(("bound", *(UNITS.of_time(reports[-1].plan.bound_seconds) for _ in courses)))
    for rank, limit in enumerate(reports[-1].budget_bytes):
        peaks = [UNITS.of_memory(report.measured_peak_bytes[rank]) for report in reports]
        rows.append((f"peak of process {rank}, of {UNITS.of_memory(limit)}", *peaks))
    return aligned(rows)


def draw(name: str, same: Any, planned: Any, path: Path) -> None:
    """Both steps as they were measured, the ones of the table."""
    before, after = same.measured, planned.measured
    first, second = (UNITS.of_time(step.step_seconds) for step in (before, after))
    share = 1 - after.step_seconds / before.step_seconds
    change = f"{abs(share):.0%} {'less' if share > 0 else 'more'}"
    schedule = after.schedule
    counts = f"{schedule.name}: {schedule.stages} stages, {schedule.micro_batches} micro-batches"
    drawn = svg(
        before,
        after,
        names=(f"{name} (measured)", "planned (measured)"),
        budget_bytes=planned.budget_bytes,
        units=UNITS,
        title=f"Planned, the step takes {second} in place of {first}: {change}",
        subtitle=f"A small GPT, {counts}; each rank within its budget",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(drawn, encoding="utf-8")
    peak, limit = (UNITS.of_memory(max(each)) for each in (planned.measured_peak_bytes, planned.budget_bytes))
    print("The plan changed no bit of the losses and parameters.")
    print(f"It took {peak} at most, of {limit}. The picture of the steps is {path}")
