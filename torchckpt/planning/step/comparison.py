"""Comparison: a measured step beside the same step on paper, with the costs that it had."""
from __future__ import annotations

from dataclasses import dataclass, replace

from torchckpt.planning.draw.gantt import gantt
from torchckpt.planning.draw.svg import svg
from torchckpt.planning.draw.units import Units, aligned, percent, units_of_clock
from torchckpt.planning.figures import Drawn
from torchckpt.planning.step.bound import bound_of
from torchckpt.planning.step.placement import without
from torchckpt.planning.step.simulated import Step
from torchckpt.planning.step.table import step_named
from torchckpt.planning.step.timeline import Timeline

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True)
class Comparison(Drawn):
    """A measured step, and what it is compared with. Shares are of ``none``."""

    measured: Timeline
    simulated: Timeline
    """The step on paper, of the same schedule."""
    none: Timeline
    """The step on paper without recomputation."""
    arrival: Timeline
    """The step on paper in which everything is recomputed when its gradient is there."""
    bound_seconds: float
    """The least seconds that the recomputation of this schedule adds to ``none``."""
    step: Step
    """What was simulated, with the costs that were measured."""

    def overhead(self, timeline: Timeline) -> float:
        """The share by which a step is longer than without recomputation."""
        least = self.none.step_seconds
        return timeline.step_seconds / least - 1 if least else 0.0

    def hidden(self, timeline: Timeline) -> float:
        """The share of what recompute at arrival adds that a step does not take."""
        least, most = self.none.step_seconds, self.arrival.step_seconds
        return 1 - (timeline.step_seconds - least) / (most - least) if most > least else 0.0

    @property
    def deviation(self) -> float:
        """The share by which the measured step is longer than the simulated one."""
        return self.measured.step_seconds / self.simulated.step_seconds - 1 if self.simulated.step_seconds else 0.0

    def table(self) -> str:
        """The tables for people: the steps, then the stages.

        Everything is measured against the simulated step without recomputation, so what the machine adds to the
        measured one counts as overhead, and what is not recomputed at all as hidden.
        """
        units = Units(time="ms", seconds=1e-3, memory="MB", bytes=1e6)
        rows: list[tuple[str, ...]] = [("", "step", "overhead", "hidden")]
        steps = {
            "none (simulated)": self.none,
            "at arrival (simulated)": self.arrival,
            "this schedule (simulated)": self.simulated,
            "this schedule (measured)": self.measured,
        }
        for name, timeline in steps.items():
            hidden = "-" if timeline is self.none else f"{self.hidden(timeline):.2f}"
            shares = percent(self.overhead(timeline)), hidden
            rows.append((name, units.of_time(timeline.step_seconds), *shares))
        least = self.none.step_seconds
        share = percent(self.bound_seconds / least if least else 0.0)
        rows.append(("bound", units.of_time(least + self.bound_seconds), share, ""))
        stages: list[tuple[str, ...]] = [("stage", "forward", "backward", "recompute", "peak of rank")]
        peaks = self.measured.peak_bytes
        for stage, work in enumerate(self.step.stages):
            backward = work.input_grad_seconds + work.weight_grad_seconds
            times = work.forward_seconds, backward, work.recompute_seconds
            peak = units.of_memory(peaks[self.measured.schedule.placement[stage]])
            stages.append((str(stage), *map(units.of_time, times), peak))
        return f"{aligned(rows)}\n\n{aligned(stages)}"

    def chart(self, width: int = 160) -> str:
        """The measured step over the simulated one, as text on one scale of time."""
        full = max(self.measured.step_seconds, self.simulated.step_seconds)
        measured, simulated = (gantt(timeline, width, full) for timeline in (self.measured, self.simulated))
        return f"measured\n{measured}\n\nsimulated\n{simulated}"

    def _svg(self) -> str:
        """The measured step over the simulated one, with lines at the step without recomputation and at the bound, both
        on paper."""
        least = self.none.step_seconds
        by = f"{abs(self.deviation) * 100:.1f} % {'longer' if self.deviation > 0 else 'shorter'} than"
        most = max((*self.measured.peak_bytes, *self.simulated.peak_bytes), default=0.0)
        units = units_of_clock(most)
        step = replace(units, digits=3).of_time(self.measured.step_seconds)
        return svg(
            self.measured,
            self.simulated,
            names=("measured", "on paper, with the costs that were measured"),
            title=f"The step takes {step}, {by if self.deviation else 'as'} on paper",
            lines=[{"no recomputation": least, "bound": least + self.bound_seconds}] * 2,
            units=units,
        )

    def __str__(self) -> str:
        return self.table()


def compare(measured: Timeline, step: Step) -> Comparison:
    """``measured`` beside ``step``, the same on paper, with costs that were measured too."""
    plain = replace(step, schedule=without(step.schedule), choices={})
    floor = bound_of(step).overhead_seconds
    late = step_named(plain, "arrival").timeline
    return Comparison(measured, step.explained(), plain.timeline, late, floor, step)
