"""Measured: steps of a plan that were run, beside the plan."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from torchckpt.model.draw.units import Units, aligned, percent
from torchckpt.model.plan.result import PipelinePlan
from torchckpt.model.plan.search.replay import memory_of
from torchckpt.model.plan.show.text import by_stage, units_of
from torchckpt.model.schedule.run import Run
from torchckpt.model.simulation.timeline import Timeline

__all__ = ["PlannedStep", "with_memory_of"]


@dataclass(frozen=True)
class PlannedStep:
    """What a plan says of a step, and what was measured. Collections of bytes have one entry per rank."""

    plan: PipelinePlan
    measured: Timeline
    """The last step."""
    steps_seconds: tuple[float, ...]
    """Of the steps that are remembered."""
    budget_bytes: tuple[float, ...]
    planned_peak_bytes: tuple[float, ...]
    """With what a step takes beside the activations, where steps were measured before the plan was made."""
    measured_peak_bytes: tuple[float, ...] | None
    """Of one step, the second with this plan, above what was there before it. None before that."""

    @property
    def step_seconds(self) -> float:
        """Measured, the median."""
        return median(self.steps_seconds)

    @property
    def deviation(self) -> float:
        """Measured over planned, less one."""
        return self.step_seconds / self.plan.step_seconds - 1

    def table(self) -> str:
        """For people: the step, the peaks of the ranks, and what is recomputed of the stages."""
        return f"{aligned(self._steps())}\n\n{aligned(self._peaks())}\n\n{by_stage(self.plan, units_of(self.plan))}"

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.plan.summary}"

    def _steps(self) -> list[tuple[str, ...]]:
        plan, units = self.plan, _UNITS
        steps = ("planned", plan.step_seconds), ("measured", self.step_seconds), ("bound", plan.bound_seconds)
        rows: list[tuple[str, ...]] = [("", "step", "over keeping all")]
        return rows + [(name, units.of_time(seconds), percent(plan.overhead(seconds))) for name, seconds in steps]

    def _peaks(self) -> list[tuple[str, ...]]:
        measured: Sequence[float | None] = self.measured_peak_bytes or [None] * len(self.budget_bytes)
        rows: list[tuple[str, ...]] = [("rank", "planned peak", "measured peak", "budget")]
        for rank, (planned, found) in enumerate(zip(self.planned_peak_bytes, measured)):
            texts = (_UNITS.of_memory(planned), "-" if found is None else _UNITS.of_memory(found))
            rows.append((str(rank), *texts, _UNITS.of_memory(self.budget_bytes[rank])))
        return rows


_UNITS = Units(time="ms", seconds=1e-3, memory="MB", bytes=1e6)


def with_memory_of(plan: PipelinePlan, measured: Timeline) -> Timeline:
    """``measured``, a step of ``plan``, with what its actions held."""
    times = [
        {event.action: (event.start_seconds, event.end_seconds) for event in measured.events if event.rank == rank}
        for rank in range(len(measured.schedule.ranks))
    ]
    ordered = [[own[action] for action in order] for own, order in zip(times, measured.schedule.ranks)]
    starts, ends = ([[pair[at] for pair in own] for own in ordered] for at in (0, 1))
    memory = memory_of(measured.schedule, plan.problem.stages, plan.choices, Run(starts, ends, [], []))
    return replace(measured, memory=memory)
