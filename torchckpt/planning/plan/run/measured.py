"""Measured: steps of a plan that were run, beside the plan."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from torchckpt.planning.draw.units import Units, aligned, percent
from torchckpt.planning.order.schedule import Action
from torchckpt.planning.plan.result import PipelinePlan
from torchckpt.planning.plan.text import by_stage, units_of
from torchckpt.planning.step.memory import Curve, Level
from torchckpt.planning.step.timeline import Timeline

__all__ = ["PlannedStep", "with_levels"]


@dataclass(frozen=True)
class PlannedStep:
    """A planned step beside the steps that were measured. Collections of bytes have one entry per rank."""

    plan: PipelinePlan
    measured: Timeline
    """The last step. Its curves of memory are of the step whose bytes were counted."""
    steps_seconds: tuple[float, ...]
    """The seconds of the steps that are remembered."""
    budget_bytes: tuple[float, ...]
    planned_peak_bytes: tuple[float, ...]
    """The planned peaks. Where steps were measured before the plan was made, they count all that a step takes."""
    measured_peak_bytes: tuple[float, ...] | None
    """The peaks of the second step of this plan, beyond the bytes that were allocated before it. None until then."""

    @property
    def step_seconds(self) -> float:
        """The median of the measured steps."""
        return median(self.steps_seconds)

    @property
    def deviation(self) -> float:
        """The share by which the measured step is longer than the planned one."""
        return self.step_seconds / self.plan.step_seconds - 1

    def table(self) -> str:
        """The tables for people: the step, the peaks of the ranks, and what each stage recomputes."""
        plan = self.plan
        named = ("planned", plan.step_seconds), ("measured", self.step_seconds), ("bound", plan.bound_seconds)
        steps: list[tuple[str, ...]] = [("", "step", "over keeping all")]
        steps += [(name, _UNITS.of_time(seconds), percent(plan.overhead(seconds))) for name, seconds in named]
        measured: Sequence[float | None] = self.measured_peak_bytes or [None] * len(self.budget_bytes)
        peaks: list[tuple[str, ...]] = [("rank", "planned peak", "measured peak", "budget")]
        for rank, amounts in enumerate(zip(self.planned_peak_bytes, measured, self.budget_bytes)):
            texts = ("-" if amount is None else _UNITS.of_memory(amount) for amount in amounts)
            peaks.append((str(rank), *texts))
        return f"{aligned(steps)}\n\n{aligned(peaks)}\n\n{by_stage(plan, units_of(plan))}"

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.plan.summary}"


_UNITS = Units(time="ms", seconds=1e-3, memory="MB", bytes=1e6)


def with_levels(measured: Timeline, levels: Sequence[Mapping[Action, Level]]) -> Timeline:
    """``measured``, with the bytes that its actions were measured to hold on each rank."""
    times: list[dict[Action, tuple[float, float]]] = [{} for _ in measured.schedule.ranks]
    for event in measured.events:
        times[event.rank].setdefault(event.action, (event.start_seconds, event.end_seconds))
    return replace(measured, memory=tuple(map(_curve, times, levels)))


def _curve(times: Mapping[Action, tuple[float, float]], taken: Mapping[Action, Level]) -> Curve:
    """The curve of one rank: the most that each action takes, from its start on, and what it leaves."""
    curve = [(0.0, 0.0)]
    for action, (start, end) in sorted(times.items(), key=lambda pair: pair[1]):
        if action in taken:
            curve += [(start, taken[action].highest), (end, taken[action].left)]
    return tuple(curve)
