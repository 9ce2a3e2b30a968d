"""Side by side: the same steps without recomputation, with it when gradients arrive, and with it ahead of them."""
from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from torchckpt.planning import Timeline
from torchckpt.planning.draw.svg import svg
from torchckpt.planning.draw.units import Units, aligned
from torchckpt.planning.step.table import Comparison

if TYPE_CHECKING:
    from train_gpt_distributed import Trainer

__all__ = ["show"]

UNITS = Units("ms", 1e-3, "MiB", 2**20, digits=3)


def show(build: Callable[[str], Trainer], steps: int, path: Path) -> None:
    """Let all make the same steps. The process of the last stage prints what came of it, and draws."""
    plain = Course("no recomputation", build("none"))
    stock = Course("torch.utils.checkpoint", build("stock"))
    ahead = Course("recompute_ahead", build("ahead"))
    ahead.report = ahead.trainer.schedule.report
    late = Course("recompute_ahead, segments=0", build("late"))
    late.report = late.trainer.schedule.report
    courses = [plain, stock, ahead, late]
    for step in range(steps):  # in turns, so that whatever else the machine does slows each of them alike
        for course in courses:
            torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
            course.step()
    equal = [is_equal(course, plain) for course in courses]
    if plain.losses:
        print(f"{table(courses, equal)}\n\n{ahead.typical()}\n", flush=True)
    if not all(equal):
        sys.exit("Losses or parameters differ: recomputation has changed the training.")
    if plain.losses:
        draw(late.typical().measured, ahead.typical(), path)


class Course:
    """The steps of one of them."""

    def __init__(self, name: str, trainer: Trainer) -> None:
        self.name, self.trainer = name, trainer
        self.report: Callable[[], Comparison] | None = None
        self.losses: list[float] = []  # in the process that has them
        self.seconds: list[float] = []
        self.reports: list[Comparison] = []

    def step(self) -> None:
        dist.barrier()
        start = time.perf_counter()
        loss = self.trainer.step()
        dist.barrier()
        self.seconds.append(time.perf_counter() - start)
        self.losses += [] if loss is None else [loss]
        self.reports += [self.report()] if self.report else []

    def typical(self) -> Comparison:
        """Of the step of median length, the first one aside."""
        lengths = [report.measured.step_seconds for report in self.reports]
        return self.reports[lengths.index(statistics.median_low(lengths[1:] or lengths))]


def is_equal(one: Course, other: Course) -> bool:
    """To the bit, in all processes."""
    parameters = zip(one.trainer.modules.parameters(), other.trainer.modules.parameters())
    same = one.losses == other.losses and all(torch.equal(*pair) for pair in parameters)
    agreed = torch.tensor(int(same), device=one.trainer.device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed)


def table(courses: list[Course], equal: list[bool]) -> str:
    rows: list[tuple[str, ...]] = [("", *(course.name for course in courses))]
    for step, losses in enumerate(zip(*(course.losses for course in courses)), 1):
        rows.append((f"loss of step {step}", *(f"{loss:.8f}" for loss in losses)))
    rows.append(("parameters bit-equal", *("yes" if same else "NO" for same in equal)))
    rows.append(("ms a step, median", *(f"{statistics.median(course.seconds) * 1e3:.0f}" for course in courses)))
    return aligned(rows)


def draw(late: Timeline, ahead: Comparison, path: Path) -> None:
    none, least = ahead.none, ahead.none.step_seconds
    before, after = (UNITS.of_time(step.step_seconds) for step in (late, ahead.measured))
    share = 1 - ahead.measured.step_seconds / late.step_seconds
    change = f"{abs(share):.0%} {'shorter' if share > 0 else 'longer'}"
    names = (
        "nothing recomputed (on paper, with the costs of this run)",
        "recomputed when the gradient arrives (measured)",
        "recomputed ahead (measured)",
    )
    title = f"Recomputed ahead, the step takes {after} in place of {before}: {change}"
    schedule = none.schedule
    what = f"A small GPT, {schedule.name}: {schedule.stages} stages, {schedule.micro_batches} micro-batches"
    lines = [{}, *[{"no recomputation": least}] * 2]
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = svg(none, late, ahead.measured, names=names, units=UNITS, title=title, lines=lines, subtitle=what)
    path.write_text(drawn, encoding="utf-8")
    print("Recomputation changed no bit of the losses and parameters.")
    print(f"Ahead of gradients the step took {after}, at their arrival {before}. The picture of the steps is {path}")
