"""Timeline: one step that says of itself what it took, as text and as a picture."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torchckpt.model.draw.svg import svg
from torchckpt.model.draw.units import Units, aligned, percent, row_name, units_for
from torchckpt.model.figures import TimelineFigures
from torchckpt.model.schedule.action import Kind

__all__ = ["Timeline"]

_COLUMNS = (
    ("forward", (Kind.FORWARD,)),
    ("backward", (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)),
    ("recompute", (Kind.RECOMPUTE,)),
)


@dataclass(frozen=True)
class Timeline(TimelineFigures):
    """One step, simulated or measured. ``print()`` shows a table, a notebook the picture.

    >>> print(simulate(one_f_one_b(2, 4)))
    1f1b, 2 stages, 4 micro-batches: step 15
    <BLANKLINE>
             forward  backward  recompute    idle  peak
    stage 0        4         8          0  20.0 %   2 A
    stage 1        4         8          0  20.0 %   1 A
    """

    units: Units | None = field(default=None, compare=False, repr=False)
    """How its times and its memory are written. Default: seconds and bytes where memory is large, else bare numbers."""

    def draw(
        self,
        *,
        budget_bytes: float | Sequence[float] | None = None,
        units: Units | None = None,
        copies: bool = False,
    ) -> str:
        """An SVG: who does what when, and the memory that it takes.

        >>> text = simulate(one_f_one_b(2, 4)).draw()  # for Path("step.svg").write_text(text, encoding="utf-8")

        Args:
            budget_bytes, units, copies: as of :func:`~torchckpt.model.draw.svg.svg`.
        """
        return svg(self, budget_bytes=budget_bytes, units=units or self._units, copies=copies)

    def _repr_svg_(self) -> str:
        """For a notebook."""
        return self.draw()

    def __str__(self) -> str:
        schedule, units = self.schedule, self._units
        has_memory = any(self.memory)
        rows = [("", *(name for name, _ in _COLUMNS), "idle", *(["peak"] * has_memory))]
        for rank, idle in enumerate(self.idle_share):
            times = (units.of_time(self._seconds_of(rank, kinds)) for _, kinds in _COLUMNS)
            peak = [units.of_memory(self.peak_bytes[rank])] if has_memory else []
            rows.append((row_name(schedule, rank), *times, percent(idle), *peak))
        counts = f"{schedule.stages} stages, {schedule.micro_batches} micro-batches"
        return f"{schedule.name}, {counts}: step {units.of_time(self.step_seconds)}\n\n{aligned(rows)}"

    @property
    def _units(self) -> Units:
        return self.units or units_for(max(self.peak_bytes, default=0.0))

    def _seconds_of(self, rank: int, kinds: Sequence[Kind]) -> float:
        own = (event for event in self.events if event.rank == rank and event.action.kind in kinds)
        return sum(event.end_seconds - event.start_seconds for event in own)
