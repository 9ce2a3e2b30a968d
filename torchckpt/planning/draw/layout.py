"""Layout: the scales that all panels of a Gantt chart share, and where their parts stand."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torchckpt.planning.draw.canvas import CHARACTER, Axis
from torchckpt.planning.draw.units import Units, label
from torchckpt.planning.figures import Event, TimelineFigures

__all__ = ["ARRIVALS", "LEFT", "RIGHT", "WIDTH", "WIRE", "Layout", "box", "fits", "label_size", "layout_of"]

WIDTH, LEFT, RIGHT = 960.0, 84.0, 24.0
ARRIVALS, WIRE = 5.0, 9.0  # ticks above a row; a row of messages in one direction
_DIGITS = 3  # of a number in a picture


@dataclass(frozen=True)
class Layout:
    """What all panels of a picture share."""

    time: Axis
    memory_bytes: float
    budget_bytes: float | None
    own_bytes: tuple[float, ...]
    """Per rank its budget; empty where there is one line for all."""
    units: Units
    row_height: float
    show_labels: bool
    show_copies: bool
    show_memory: bool

    @property
    def pitch(self) -> float:
        """From one rank to the next."""
        return ARRIVALS + self.row_height + (2 * WIRE if self.show_copies else 0.0)


def layout_of(
    timelines: Sequence[TimelineFigures],
    budget: float | Sequence[float] | None,
    units: Units,
    copies: bool,
    lines: Sequence[Mapping[str, float]],
) -> Layout:
    own = tuple(budget) if isinstance(budget, Sequence) else ()
    line = budget if isinstance(budget, (int, float)) else max(own, default=None)
    ranks = max((len(timeline.schedule.ranks) for timeline in timelines), default=1)
    steps = [timeline.step_seconds for timeline in timelines]
    peaks = [peak for timeline in timelines for peak in timeline.peak_bytes]
    time = Axis(max([*steps, *(at for own in lines for at in own.values())], default=0.0), LEFT, WIDTH - RIGHT)
    height = min(24.0, max(5.0, 200.0 / max(ranks, 1)))
    show = all(_most_labels_fit(timeline, time, height) for timeline in timelines)
    has_memory = not timelines or _memory_tells(timelines, line)
    most = max(*peaks, line or 0.0, 0.0, 0.0) * 1.12
    return Layout(time, most, line, own, replace(units, digits=_DIGITS), height, show, copies, has_memory)


def _memory_tells(timelines: Sequence[TimelineFigures], budget_bytes: float | None) -> bool:
    """Whether curves say more than the peak in words: where each is 0 or one and the same amount, they do not."""
    amounts = {amount for timeline in timelines for curve in timeline.memory for _, amount in curve if amount}
    return len(amounts) > 1 or bool(amounts and budget_bytes is not None)


def box(event: Event, time: Axis) -> tuple[float, float]:
    """Where the box of ``event`` begins, and its width; a sliver of white parts it from the next."""
    start, end = time(event.start_seconds), time(event.end_seconds)
    return start, (end - start) - min(1.0, 0.15 * (end - start))


def fits(text: str, width: float, height: float) -> bool:
    return height >= 11 and len(text) * CHARACTER * label_size(height) <= width - 2


def label_size(height: float) -> float:
    """Of the font of labels in boxes."""
    return min(11.5, height * 0.72)


def _most_labels_fit(timeline: TimelineFigures, time: Axis, height: float) -> bool:
    found = [fits(label(timeline.schedule, event.action), box(event, time)[1], height) for event in timeline.events]
    return 2 * sum(found) >= len(found)
