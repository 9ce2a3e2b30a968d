"""Memory SVG: the bytes of the ranks over the time of a step, in a panel of a Gantt chart."""
from __future__ import annotations

from collections.abc import Sequence

from torchckpt.planning.draw.canvas import Axis, Canvas
from torchckpt.planning.draw.layout import LEFT, RIGHT, WIDTH, Layout
from torchckpt.planning.draw.units import number
from torchckpt.planning.figures import TimelineFigures

__all__ = ["FEW_RANKS", "draw_memory", "memory_height"]

FEW_RANKS = 8  # of more, only the curve that peaks is drawn
_CAPTION, _TOGETHER = 24.0, 72.0
_OWN, _APART = 40.0, 6.0  # of one rank, where each is drawn by itself


def memory_height(timeline: TimelineFigures, layout: Layout) -> float:
    """That the panel takes, what stands above it too."""
    if not layout.show_memory:
        return 4.0
    return 14.0 + len(timeline.memory) * (_OWN + _APART) if layout.own_bytes else _CAPTION + _TOGETHER


def draw_memory(canvas: Canvas, timeline: TimelineFigures, layout: Layout, bottom: float) -> None:
    """The curve of the rank that needs most, of few ranks all; where each rank has its budget, each by itself."""
    if layout.show_memory:
        (_each if layout.own_bytes else _together)(canvas, timeline, layout, bottom)


def _together(canvas: Canvas, timeline: TimelineFigures, layout: Layout, bottom: float) -> None:
    axis = Axis(layout.memory_bytes, bottom, bottom - _TOGETHER)
    for tick in axis.ticks(4, layout.units.bytes):
        canvas.line(LEFT, axis(tick), WIDTH - RIGHT, axis(tick), class_="grid")
        canvas.words(LEFT - 8, axis(tick) + 4, number(tick / layout.units.bytes), class_="end")
    unit = layout.units.many or layout.units.memory
    canvas.words(LEFT, bottom - _TOGETHER - 2, f"memory, {unit}" if unit else "memory")
    peaks = timeline.peak_bytes
    largest = peaks.index(max(peaks)) if peaks else None
    for rank, curve in enumerate(timeline.memory):
        if rank != largest and len(timeline.memory) <= FEW_RANKS:
            canvas.steps(_corners(curve, timeline, layout.time, axis), class_="curve")
    if largest is not None:
        outline = _corners(timeline.memory[largest], timeline, layout.time, axis)
        canvas.steps([(LEFT, bottom), *outline, (outline[-1][0], bottom)], class_="largest")
    if layout.budget_bytes is not None:
        at = axis(layout.budget_bytes)
        canvas.line(LEFT, at, WIDTH - RIGHT, at, class_="budget")


def _each(canvas: Canvas, timeline: TimelineFigures, layout: Layout, bottom: float) -> None:
    for rank, curve in enumerate(timeline.memory):
        low = bottom - (len(timeline.memory) - rank - 1) * (_OWN + _APART)
        axis = Axis(layout.memory_bytes, low, low - _OWN)
        outline = _corners(curve, timeline, layout.time, axis)
        canvas.steps([(LEFT, low), *outline, (outline[-1][0], low)], class_="largest")
        budget = layout.own_bytes[rank] if rank < len(layout.own_bytes) else 0.0
        canvas.line(LEFT, axis(budget), WIDTH - RIGHT, axis(budget), class_="budget")
        canvas.words(LEFT - 8, low - 16, f"memory {rank}", class_="end")
        canvas.words(LEFT - 8, low - 2, layout.units.of_memory(timeline.peak_bytes[rank]), class_="end")


def _corners(
    curve: Sequence[tuple[float, float]], timeline: TimelineFigures, time: Axis, memory: Axis
) -> list[tuple[float, float]]:
    """The places of the changes of a curve that holds each value up to the next one, to the end of the step."""
    changes = {0.0: 0.0, **dict(curve)}  # of changes at one moment, the last
    changes.setdefault(timeline.step_seconds, curve[-1][1] if curve else 0.0)
    return [(time(seconds), memory(amount)) for seconds, amount in changes.items()]
