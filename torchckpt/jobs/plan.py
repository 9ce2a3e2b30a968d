"""Plan: a job within the memory of its devices: what each rank holds, what a step takes, the bound; its picture."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import NoReturn

from torchckpt.errors import ArgumentError, BudgetInfeasible, Fault, called, check
from torchckpt.jobs.job import Job
from torchckpt.jobs.layout import Layout
from torchckpt.jobs.memory import RankMemory, memory_of
from torchckpt.planning.budget import Budget, enough, read, trouble, whole
from torchckpt.planning.device import BUFFERS, MARGIN, left_to_tensors
from torchckpt.planning.draw.canvas import STYLE, Axis, Canvas
from torchckpt.planning.draw.units import aligned, percent
from torchckpt.planning.order.schedules import CHUNKS
from torchckpt.planning.plan.away import bound_seconds
from torchckpt.planning.plan.pipeline import interruptible, planned
from torchckpt.planning.plan.problem import Problem, problem_of
from torchckpt.planning.plan.result import PipelinePlan
from torchckpt.planning.plan.search.bound import busiest_seconds
from torchckpt.planning.rates import Machine
from torchckpt.planning.step.simulated import Step
from torchckpt.planning.work.block import COLLECTIVE_HEADS
from torchckpt.planning.work.choice import Choice
from torchckpt.planning.work.host import Host

__all__ = ["JobPlan", "drawn", "plan_job"]

_GB = 1e9
_ROUNDING = 1e-9
_ROUNDS = 4
_ROOMY = 1e18
"""Bytes in which everything is kept, as a host may hold everything."""


@dataclass(frozen=True)
class JobPlan:
    """A job that fits its devices. Its text is what the command prints."""

    job: Job
    device_bytes: float
    pipeline: PipelinePlan | None = None
    """What is kept and recomputed, of each block and micro-batch; None where the layout says that itself."""

    @cached_property
    def memory(self) -> list[RankMemory]:
        peaks = None if self.pipeline is None else self.pipeline.peak_bytes
        return memory_of(self.job, peaks)

    @property
    def step(self) -> Step:
        """The step of the pipeline; where there is none, of one micro-batch."""
        return self.job.step if self.pipeline is None else self.pipeline.step

    @cached_property
    def step_seconds(self) -> float:
        return self.job.whole_seconds(self.job.pipeline_seconds(self.step))

    @property
    def peak_bytes(self) -> float:
        """What the fullest rank holds, with context and buffers."""
        return max(rank.total for rank in self.memory) + BUFFERS

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        layout = self.job.layout
        return layout.global_batch * layout.sequence / self.step_seconds / layout.gpus

    @property
    def mfu(self) -> float:
        """Model FLOPs over the peak in bfloat16 (see :meth:`Model.flops_per_token`)."""
        flops = self.job.model.flops_per_token(self.job.layout.sequence)
        return flops * self.tokens_per_second / self.job.machine.peak

    @cached_property
    def bubble(self) -> float:
        """The share of the pipeline's step in which its ranks compute nothing."""
        busy = 1 - fmean(self.step.timeline.idle_share)
        return max(0.0, 1 - busy * self.step.seconds / self.job.pipeline_seconds(self.step))

    @cached_property
    def recomputed_share(self) -> float:
        """The seconds of recomputation, as a share of what recomputing every block takes."""
        if self.pipeline is not None:
            return self.pipeline.recomputed_share
        layout, stages = self.job.layout, self._of_blocks.stages
        if layout.recompute != "selective":
            return layout.recomputed_share if layout.recompute == "full" else 0.0
        backward, others = (sum(stage.input_grad_seconds for stage in each) for each in (self.job.stages, stages))
        return (backward - others) / sum(stage.recompute_seconds for stage in stages)

    @cached_property
    def _of_blocks(self) -> Job:
        """The job whose blocks are kept or recomputed as a whole."""
        return under(self.job, "planned")

    @cached_property
    def away_share(self) -> float:
        """The share of the blocks, of all micro-batches, that are sent to the host."""
        choices = {} if self.pipeline is None else self.pipeline.choices
        blocks = sum(map(len, self.job.layers)) * self.job.schedule.micro_batches
        return sum(len(choice.away) for choice in choices.values() if isinstance(choice, Choice)) / blocks

    @cached_property
    def bound_seconds(self) -> float:
        """No plan of this schedule and layout has a shorter step, whatever it recomputes: whole blocks, or what
        ``selective`` does of all."""
        job = self._of_blocks
        problem = _problem(job, rooms(job, self.device_bytes)) if self.pipeline is None else self.pipeline.problem
        bound = job.whole_seconds(_busiest(problem) if job.overlaps else bound_seconds(problem))
        selective = under(job, "selective")
        if fits(selective, self.device_bytes):
            bound = min(bound, selective.step_seconds)
        return bound if math.isfinite(bound) else math.nan

    def __str__(self) -> str:
        tables = [list(self._rows()), [COLLECTIVE_HEADS, *(each.cells for each in self.job.collectives)]]
        return "\n\n".join((self.head, *(aligned(rows) for rows in tables if len(rows) > 1), self.summary))

    @property
    def head(self) -> str:
        """The model, the devices and the layout, in one line."""
        job, layout = self.job, self.job.layout
        split = " x ".join(f"{name} {getattr(layout, name)}" for name in ("tp", "cp", "pp", "dp"))
        experts = f", ep {layout.ep}" if job.model.experts else ""
        return (
            f"{job.model.name}: {job.model.parameters / 1e9:.4g} G parameters on {layout.gpus} x "
            f"{job.machine.device.name}: {split}{experts}; {layout.schedule}, {layout.micro_batches} micro-batches of "
            f"{layout.micro_batch} x {layout.sequence}; state {layout.state}, recompute {layout.recompute}"
        )

    def _rows(self) -> Iterator[tuple[str, ...]]:
        names = list(self.memory[0].parts)
        yield ("rank", *names, "buffers", "of all", "device")
        for rank, memory in enumerate(self.memory):
            values = [*memory.parts.values(), BUFFERS, memory.total + BUFFERS, self.device_bytes]
            yield (str(rank), *(f"{value / _GB:.1f} GB" for value in values))

    @property
    def summary(self) -> str:
        """The sentence that people quote."""
        share = f", {percent(self.recomputed_share)} recomputed" if self.recomputed_share else ", nothing recomputed"
        share += f", {percent(self.away_share)} away" if self.away_share else ""
        bound = f" (bound {self.bound_seconds:.4g} s)" if math.isfinite(self.bound_seconds) else ""
        return (
            f"step {self.step_seconds:.4g} s{bound}: {self.tokens_per_second:,.0f} tokens a second and GPU, "
            f"{percent(self.mfu)} MFU, bubble {percent(self.bubble)}{share}; "
            f"at most {self.peak_bytes / _GB:.1f} of {self.device_bytes / _GB:.1f} GB, {MARGIN:.0%} of which is margin"
        )

    def as_json(self) -> dict[str, object]:
        """The numbers, for a file."""
        bound = self.bound_seconds
        return {
            "model": self.job.model.name,
            "device": self.job.machine.device.name,
            **self.job.layout.as_json(),
            "step": self.step_seconds,
            "bound": bound if math.isfinite(bound) else None,
            "tokens_per_second_and_gpu": self.tokens_per_second,
            "mfu": self.mfu,
            "bubble": self.bubble,
            "recomputed_share": self.recomputed_share,
            "away_share": self.away_share,
            "device_bytes": self.device_bytes,
            "summary": self.summary,
            "collectives": [each._asdict() for each in self.job.collectives],
            "memory": [{**rank.parts, "buffers": BUFFERS} for rank in self.memory],
        }


@called("plan_job()")
def plan_job(job: Job, device_bytes: Budget | None = None, host: Host | None = None) -> JobPlan:
    """The plan of a job, within the memory of its devices.

    >>> from torchckpt.jobs import MACHINES, Layout, model_named
    >>> layout = Layout(gpus=64, tp=8, pp=4, dp=2, global_batch=256, recompute="planned")
    >>> plan = plan_job(Job(model_named("llama3-70b"), layout, MACHINES["h100"]))
    >>> round(plan.memory[0].weights / 1e9, 2)
    4.54

    Args:
        job: its layout is checked. ``recompute="planned"`` keeps what fits, and recomputes the rest as the planner of
            pipelines chooses.
        device_bytes: memory of each device: a number, or a size such as ``"80GB"``. Default: that of its data sheet.
        host: the memory of each rank on its host, and its link; blocks are sent there where that is shorter. For
            ``recompute="planned"`` alone.

    Raises:
        ArgumentError: model and layout do not divide, or an argument is wrong.
        BudgetInfeasible: a rank does not fit. The error names the largest part, and the nearest layout that fits.
    """
    memory = asked(job.machine, job.layout, device_bytes, host)
    check(list(job.layout.faults(job.model)))
    plan = fitting(job, memory, host)
    if plan is None:
        _refuse(job, memory)
    return plan


def asked(machine: Machine, layout: Layout, device_bytes: Budget | None, host: Host | None) -> float:
    """The memory of a device. An ArgumentError, if that is no size, or if the layout sends nothing to the host."""
    amount, faults = read(machine.device.memory_bytes if device_bytes is None else device_bytes), []
    if amount is None or amount.is_share or amount.number > _ROOMY:
        rule = 'the memory of a device is not a number of bytes from 1 to 1e18, or a size such as "80GB"'
        faults.append(Fault(rule, f"device_bytes={trouble(device_bytes)}", 'device_bytes="80GB"'))
    if host is not None and layout.recompute != "planned":
        rule = "a host is given, but only what is planned goes there"
        faults.append(Fault(rule, f"recompute={layout.recompute!r}", "recompute='planned'"))
    check(faults)
    return 0.0 if amount is None else float(amount.number)


def fitting(job: Job, device_bytes: float, host: Host | None = None) -> JobPlan | None:
    """The plan; None if it does not fit."""
    if job.layout.recompute != "planned":
        return JobPlan(job, device_bytes) if fits(job, device_bytes) else None
    left = rooms(job, device_bytes)
    if min(left) <= 0:
        return None
    try:
        with interruptible([], lambda plan: JobPlan(job, device_bytes, plan)):
            plan = JobPlan(job, device_bytes, planned(_problem(job, left, host)))
    except BudgetInfeasible:  # a host may hold what no device does
        return None
    parts = under(job, "selective")  # of each layer, which the planner keeps or recomputes whole
    is_best = host is None and fits(parts, device_bytes) and parts.step_seconds < plan.step_seconds * (1 - _ROUNDING)
    return JobPlan(parts, device_bytes) if is_best else plan


def under(job: Job, recompute: str) -> Job:
    """The job under another policy."""
    return replace(job, layout=replace(job.layout, recompute=recompute))


def fits(job: Job, device_bytes: float) -> bool:
    """Whether each rank of the job fits, if need be with everything recomputed where that is planned."""
    return min(rooms(job, device_bytes)) > 0 and max(map(_device_bytes, _least(job))) <= device_bytes


def _least(job: Job) -> list[RankMemory]:
    """What each rank holds at least. Where forwards do not all come first, four rounds over the ranks have as much in
    flight as all."""
    layout = job.layout
    rounds, is_planned = layout.micro_batches // layout.pp, layout.recompute == "planned"
    is_odd = layout.ahead or layout.schedule in ("gpipe", "looped_bfs")
    if rounds > _ROUNDS and not is_odd and not (layout.schedule in CHUNKS and layout.micro_batches % rounds):
        few = _ROUNDS * (layout.micro_batches // rounds) * layout.dp * layout.micro_batch
        job = replace(job, layout=replace(layout, global_batch=few))
    return memory_of(job, _problem(job, [0.0] * job.layout.pp).least_bytes if is_planned else None)


def _device_bytes(rank: RankMemory) -> float:
    """Those of a device that a rank fits, in whole bytes, as shares of them are rounded."""
    return math.ceil((rank.total + BUFFERS) / (1 - MARGIN)) + 1.0


def rooms(job: Job, device_bytes: float) -> list[float]:
    """The bytes of each rank that are left for activations; below 0 where it does not fit without any."""
    left, ranks = left_to_tensors(device_bytes), job.layout.pp
    free = [left - rank.total for rank in memory_of(job, [0.0] * ranks)]
    if not job.missing_bytes(0, free[0]):  # all gradients are there in the last replay, beside a layer
        return free
    return [2 * left - rank.total for rank in memory_of(job, [left] * ranks)]  # gradients come as activations go


def least_planned(job: Job, device_bytes: float, host: Host | None, is_quick: bool) -> float:
    """The seconds that no plan of whole blocks goes below; infinite if none fits. Quick: of the busiest rank, which
    waits for no message."""
    problem = _problem(job, rooms(job, device_bytes), host)
    return job.whole_seconds(_busiest(problem) if is_quick or job.overlaps else bound_seconds(problem))


def _busiest(problem: Problem) -> float:
    roomy = problem if problem.host is None else problem.within([_ROOMY] * len(problem.budget_bytes))
    return math.inf if roomy.too_small else busiest_seconds(roomy.lanes)


def _problem(job: Job, left: Sequence[float], host: Host | None = None) -> Problem:
    return problem_of(job.schedule, job.stages, [max(1.0, room) for room in left], 0.0, host)


def _refuse(job: Job, device_bytes: float) -> NoReturn:
    """Raise the error for a job that does not fit."""
    layout, memory = job.layout, _least(job)
    rank = max(range(len(memory)), key=lambda rank: memory[rank].total)
    needed = _device_bytes(memory[rank])
    part, size = max(memory[rank].parts.items(), key=lambda item: item[1])
    near = next(_near(job, device_bytes), None)
    works = "a device with more memory, or more GPUs"
    if near is not None:
        works = ", ".join(f"{name}={new!r}" for name in _NAMES if (new := getattr(near, name)) != getattr(layout, name))
    rule = (
        f"the job does not fit: rank {rank} needs {enough(needed)} bytes, {MARGIN:.0%} of which are left to the "
        f"allocator, and most of them {part}: {enough(size)}"
    )
    raise BudgetInfeasible(str(Fault(rule, f"{whole(device_bytes)} bytes", works)), needed, None, rank)


_NAMES = ("gpus", "tp", "pp", "dp", "micro_batch", "recompute", "state")
_MOST_CHANGES = 8
"""From a replica on each GPU to what fits: a tenth of a second."""


def _near(job: Job, device_bytes: float) -> Iterator[Layout]:
    """Layouts that fit: first those that change one thing, then two, and so on."""
    layouts = [job.layout]
    for _ in range(_MOST_CHANGES):
        layouts = list(dict.fromkeys(new for old in layouts for new in _changed(old)))
        for layout in layouts:
            other = replace(job, layout=layout)
            with suppress(ArgumentError):  # micro-batches that do not suit the schedule
                if not list(layout.faults(job.model)) and fits(other, device_bytes):
                    yield layout


def _changed(layout: Layout) -> Iterator[Layout]:
    """Layouts that differ in one thing, and need less memory."""
    if layout.recompute in ("none", "selective"):
        yield replace(layout, recompute="full")
    if layout.state == "none":
        yield replace(layout, state="zero1")
    if layout.micro_batch > 1:
        yield replace(layout, micro_batch=layout.micro_batch // 2)
    for name in ("tp", "pp"):
        if layout.dp % 2 == 0 and (name != "tp" or layout.tp < 8):
            yield replace(layout, **{name: 2 * getattr(layout, name), "dp": layout.dp // 2})
        elif name == "pp":
            yield replace(layout, pp=2 * layout.pp, gpus=2 * layout.gpus)
    if layout.state == "zero1":
        yield replace(layout, dp=2 * layout.dp, gpus=2 * layout.gpus)


_COLOURS = {
    "weights": "#0b6e99", "gradients": "#4f9cb8", "optimizer": "#a3cbdb", "gathered": "#8450a6",
    "activations": "#c7511f", "working": "#e59b72", "buffers": "#8a8a8a",
}  # fmt: skip
_STYLE = STYLE + " ".join(f".{name}{{fill:{colour}}}" for name, colour in _COLOURS.items())
_WIDTH, _LEFT, _RIGHT, _HEIGHT = 960.0, 84.0, 24.0, 300.0


def drawn(plan: JobPlan) -> str:
    """An SVG: a bar for each rank of the pipeline, its parts from below, the device's memory and its margin; then who
    does what when. Where the plan recomputes or sends away, the step that keeps everything stands above it."""
    ranks = [{**memory.parts, "buffers": BUFFERS} for memory in plan.memory]
    canvas, right = Canvas(_WIDTH), _WIDTH - _RIGHT
    speed = f"{plan.step_seconds:.4g} s a step, {plan.tokens_per_second:,.0f} tokens a second and GPU"
    top = canvas.headed(_LEFT, plan.job.model.name, speed) + 24
    most = max(plan.device_bytes, *(sum(parts.values()) for parts in ranks)) * 1.05
    axis = Axis(most, top + _HEIGHT, top)
    canvas.grid(axis, _LEFT, right, _GB, 6, " GB")
    wide = (right - _LEFT) / len(ranks)
    for rank, parts in enumerate(ranks):
        x, below = _LEFT + rank * wide, 0.0
        for name, size in parts.items():
            above = below + size
            box = x + 0.1 * wide, axis(above), 0.8 * wide, axis(below) - axis(above)
            canvas.bar(*box, f"rank {rank}: {name} {size / _GB:.1f} GB", name)
            below = above
        canvas.words(x + wide / 2, axis.start + 18, str(rank), class_="middle")
    for share, words, under in ((1.0, "device", -4), (1 - MARGIN, "less the margin", 14)):
        y = axis(share * plan.device_bytes)
        canvas.line(_LEFT, y, right, y, class_="budget")
        canvas.words(right, y + under, f"{words} {share * plan.device_bytes / _GB:.0f} GB", class_="end")
    height = canvas.legend(((name, name) for name in _COLOURS), _LEFT, axis.start + 44)
    is_compared = plan.pipeline is not None and plan.recomputed_share + plan.away_share > 0
    step = plan.pipeline if plan.pipeline is not None and is_compared else plan.step.timeline
    return canvas.text(canvas.insert(step.draw(), height), plan.summary, _STYLE)
