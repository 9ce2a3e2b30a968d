"""Gantt chart as SVG: who does what when, when gradients arrive, and the memory that it takes, on one time scale.

 ┌ panel, one per timeline ──────────────────────────────────────────────────┐
 │ [1] name: step, change, idle, peak                                        │
 │ [2] stage 0 │ boxes: F, R, B (or I and W); a tick above a row: a gradient │
 │     stage 1 │ has arrived there                                           │
 │     copies  │ if asked for: what leaves the stage, under its row          │
 │ [3] memory  │ the curve of the rank that needs most, of few ranks all;    │
 │             │ where each rank has its budget, each rank by itself         │
 │ [4]           time                                                        │
 └───────────────────────────────────────────────────────────────────────────┘
 [5] legend
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchckpt.model.action import Kind
from torchckpt.model.axis import Axis
from torchckpt.model.canvas import Canvas
from torchckpt.model.look import CHARACTER, STYLE, clipped
from torchckpt.model.timeline import Event, Message, Timeline
from torchckpt.model.units import Units, label, number, percent, row_name

__all__ = ["compare", "svg"]

_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "R": "recompute"}
_STYLE = STYLE + """
.idle{fill:#eef0f3} .arrival{stroke:#111827;stroke-width:1.3} .curve{fill:none;stroke:#9ca3af;stroke-width:1}
.there{fill:#9fd3f2} .back{fill:#6b8fc9}
.largest{fill:#cc79a7;fill-opacity:.28;stroke:#8f3b6c;stroke-width:1.4}
"""
_ON_DARK = "BIW"

_WIDTH, _LEFT, _RIGHT = 960.0, 76.0, 24.0
_TITLE, _ARRIVALS, _MEMORY, _TIMES = 32.0, 5.0, 72.0, 34.0
_OWN_MEMORY, _APART = 40.0, 6.0  # of one rank, where each is drawn by itself
_WIRE = 9.0  # a row of messages in one direction
_FEW_RANKS = 8  # of more, only the curve that peaks is drawn
_LONGEST = 50  # name


@dataclass(frozen=True)
class _Layout:
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
        return _ARRIVALS + self.row_height + (2 * _WIRE if self.show_copies else 0.0)


def svg(
    *timelines: Timeline,
    names: Sequence[str] = (),
    budget_bytes: float | Sequence[float] | None = None,
    units: Units | None = None,
    copies: bool = False,
) -> str:
    """One panel per timeline, one over the other, on the same scales of time and memory. The memory is left out where
    no timeline has any.

    >>> text = svg(simulate(gpipe(2, 4)), budget_bytes=3)  # for Path("step.svg").write_text(text, encoding="utf-8")

    Args:
        timelines: what to draw, from the top; from the second on, the title says the change from the first.
        names: of the timelines; by default those of their schedules.
        budget_bytes: where to draw a line across the memory; by default nowhere. Of a list, with one for each rank,
            the memory of each rank is drawn by itself, under its line.
        units: how to write times and memory; by default time is a bare number, memory counts in A.
        copies: under the row of each rank, one for the activations and one for the gradients that it sends to others.
    """
    layout = _layout(timelines, budget_bytes, units or Units(), copies)
    canvas = Canvas(_WIDTH)
    y, titles = 0.0, []
    for index, timeline in enumerate(timelines):
        name = names[index] if index < len(names) else _name(timeline)
        facts = _facts(timeline, timelines[0] if index else None, layout.units)
        titles.append(f"{name}: {facts}")
        y = _panel(canvas, timeline, (name, facts), layout, y)
    bottom = _legend(canvas, timelines, layout, y)
    return canvas.text(bottom, "; ".join(titles), _STYLE)


def compare(
    before: Timeline,
    after: Timeline,
    names: tuple[str, str] = ("before", "after"),
    budget_bytes: float | None = None,
    units: Units | None = None,
) -> str:
    """``before`` over ``after``, on the same scales; see :func:`svg`."""
    return svg(before, after, names=names, budget_bytes=budget_bytes, units=units)


def _layout(
    timelines: Sequence[Timeline], budget: float | Sequence[float] | None, units: Units, copies: bool
) -> _Layout:
    own = tuple(budget) if isinstance(budget, Sequence) else ()
    line = budget if isinstance(budget, (int, float)) else max(own, default=None)
    ranks = max((len(timeline.schedule.ranks) for timeline in timelines), default=1)
    step = max((timeline.step_seconds for timeline in timelines), default=0.0)
    peaks = [peak for timeline in timelines for peak in timeline.peak_bytes]
    time = Axis(step, _LEFT, _WIDTH - _RIGHT)
    height = min(24.0, max(5.0, 200.0 / max(ranks, 1)))
    show = all(_most_labels_fit(timeline, time, height) for timeline in timelines)
    has_memory = not timelines or any(curve for timeline in timelines for curve in timeline.memory)
    most = max(*peaks, line or 0.0, 0.0, 0.0) * 1.12
    return _Layout(time, most, line, own, units, height, show, copies, has_memory)


def _most_labels_fit(timeline: Timeline, time: Axis, height: float) -> bool:
    fits = [_fits(label(timeline.schedule, event.action), _box(event, time)[1], height) for event in timeline.events]
    return 2 * sum(fits) >= len(fits)


def _fits(text: str, width: float, height: float) -> bool:
    return height >= 11 and len(text) * CHARACTER * _size(height) <= width - 2


def _size(height: float) -> float:
    return min(10.5, height * 0.72)


def _name(timeline: Timeline) -> str:
    schedule = timeline.schedule
    return f"{schedule.name}, {schedule.stages} stages, {schedule.micro_batches} micro-batches"


def _facts(timeline: Timeline, first: Timeline | None, units: Units) -> str:
    """[1]"""
    step, idle, peaks = timeline.step_seconds, timeline.idle_share, timeline.peak_bytes
    change = f" ({step / first.step_seconds * 100 - 100:+.1f} %)" if first and first.step_seconds else ""
    mean = sum(idle) / len(idle) if idle else 0.0
    peak = f", peak {units.of_memory(max(peaks, default=0.0))}" if any(timeline.memory) or not peaks else ""
    return f"step {units.of_time(step)}{change}, idle {percent(mean)}{peak}"


def _panel(canvas: Canvas, timeline: Timeline, title: tuple[str, str], layout: _Layout, top: float) -> float:
    """Draw ``timeline`` from ``top`` on; where the next panel begins."""
    canvas.words(_LEFT, top + 22, clipped(title[0], _LONGEST), class_="name")
    canvas.words(_WIDTH - _RIGHT, top + 22, title[1], class_="facts end")
    rows = top + _TITLE
    memory = rows + len(timeline.schedule.ranks) * layout.pitch + (14 if layout.show_memory else 4)
    height = len(timeline.memory) * (_OWN_MEMORY + _APART) if layout.own_bytes else _MEMORY
    bottom = memory + (height if layout.show_memory else 0.0)
    _grid(canvas, layout, rows, bottom)
    _rows(canvas, timeline, layout, rows)
    if layout.show_memory:
        (_own_memory if layout.own_bytes else _memory)(canvas, timeline, layout, memory, bottom)
    _times(canvas, layout, bottom)
    return bottom + _TIMES


def _grid(canvas: Canvas, layout: _Layout, top: float, bottom: float) -> None:
    for tick in layout.time.ticks(10, layout.units.seconds):
        canvas.line(layout.time(tick), top, layout.time(tick), bottom, class_="grid")


def _rows(canvas: Canvas, timeline: Timeline, layout: _Layout, top: float) -> None:
    """[2]"""
    pitch = layout.pitch
    every = -(-(26 if layout.show_copies else 12) // int(pitch))  # rows from one name to the next, so that none touch
    for rank in range(len(timeline.schedule.ranks)):
        y = top + rank * pitch + _ARRIVALS
        canvas.rectangle(_LEFT, y, layout.time(timeline.step_seconds) - _LEFT, layout.row_height, class_="idle")
        if rank % every == 0:
            name = row_name(timeline.schedule, rank)
            canvas.words(_LEFT - 8, y + layout.row_height / 2 + 4, name, class_="end")
        _boxes(canvas, timeline, [event for event in timeline.events if event.rank == rank], layout, y)
        if layout.show_copies and every == 1:
            canvas.words(_LEFT - 8, y + layout.row_height + 1 + _WIRE, "copies", class_="end")
        if layout.show_copies:
            _copies(canvas, timeline, rank, layout, y + layout.row_height + 1)
        arrived = [(layout.time(at), y - _ARRIVALS + 0.5) for at in _arrivals(timeline, rank)]
        if arrived:
            canvas.ticks(arrived, _ARRIVALS - 0.5, class_="arrival")


def _boxes(canvas: Canvas, timeline: Timeline, events: Sequence[Event], layout: _Layout, y: float) -> None:
    """What one rank does."""
    height, size = layout.row_height, _size(layout.row_height)
    by_kind: dict[str, list[tuple[float, float, float, float]]] = {}
    for event in events:
        x, width = _box(event, layout.time)
        by_kind.setdefault(event.action.kind.value, []).append((x, y, width, height))
    for kind, boxes in by_kind.items():
        canvas.boxes(boxes, class_=kind)
    for event in events if layout.show_labels else ():
        text, (x, width) = label(timeline.schedule, event.action), _box(event, layout.time)
        shade = "light" if event.action.kind.value in _ON_DARK else "dark"
        if _fits(text, width, height):
            place = (x + width / 2, y + height / 2 + size * 0.36)
            canvas.words(*place, text, class_=f"middle {shade}", style=f"font-size:{size:g}px")


def _copies(canvas: Canvas, timeline: Timeline, rank: int, layout: _Layout, y: float) -> None:
    """What ``rank`` sends to others: activations, and under them gradients."""
    sent: dict[str, list[tuple[float, float, float, float]]] = {"there": [], "back": []}
    for message in _from(timeline, rank):
        x, end = layout.time(message.sent_seconds), layout.time(message.arrived_seconds)
        way = "there" if message.action.kind is Kind.FORWARD else "back"
        sent[way].append((x, y + (_WIRE if way == "back" else 0.0), end - x - min(1.0, 0.15 * (end - x)), _WIRE - 2))
    for way, boxes in sent.items():
        if boxes:
            canvas.boxes(boxes, class_=way)


def _from(timeline: Timeline, rank: int) -> list[Message]:
    """What goes from ``rank`` to another one."""
    placement = timeline.schedule.placement
    return [
        message
        for message in timeline.messages
        if placement[message.action.stage] == rank != placement[message.to_stage]
    ]


def _box(event: Event, time: Axis) -> tuple[float, float]:
    """Where the box of ``event`` begins, and its width; a sliver of white parts it from the next."""
    start, end = time(event.start_seconds), time(event.end_seconds)
    return start, (end - start) - min(1.0, 0.15 * (end - start))


def _arrivals(timeline: Timeline, rank: int) -> list[float]:
    """When gradients come to ``rank`` from another one."""
    placement = timeline.schedule.placement
    return [
        message.arrived_seconds
        for message in timeline.messages
        if message.action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD)
        and placement[message.to_stage] == rank != placement[message.action.stage]
    ]


def _memory(canvas: Canvas, timeline: Timeline, layout: _Layout, top: float, bottom: float) -> None:
    """[3]"""
    axis = Axis(layout.memory_bytes, bottom, top)
    ticks = axis.ticks(5, layout.units.bytes)
    for tick in ticks:
        text = layout.units.of_memory(tick) if tick == ticks[-1] else number(tick / layout.units.bytes)
        canvas.line(_LEFT, axis(tick), _WIDTH - _RIGHT, axis(tick), class_="grid")
        canvas.words(_LEFT - 8, axis(tick) + 4, text, class_="end")
    middle = (top + bottom) / 2
    canvas.words(16, middle, "memory", class_="middle", transform=f"rotate(-90 16 {middle:g})")
    peaks = timeline.peak_bytes
    largest = peaks.index(max(peaks)) if peaks else None
    for rank, curve in enumerate(timeline.memory):
        if rank != largest and len(timeline.memory) <= _FEW_RANKS:
            canvas.steps(_corners(curve, timeline, layout.time, axis), class_="curve")
    if largest is not None:
        outline = _corners(timeline.memory[largest], timeline, layout.time, axis)
        canvas.steps([(_LEFT, bottom), *outline, (outline[-1][0], bottom)], class_="largest")
    if layout.budget_bytes is not None:
        at = axis(layout.budget_bytes)
        canvas.line(_LEFT, at, _WIDTH - _RIGHT, at, class_="budget")


def _own_memory(canvas: Canvas, timeline: Timeline, layout: _Layout, top: float, bottom: float) -> None:
    """[3], of each rank by itself."""
    for rank, curve in enumerate(timeline.memory):
        low = bottom - (len(timeline.memory) - rank - 1) * (_OWN_MEMORY + _APART)
        axis = Axis(layout.memory_bytes, low, low - _OWN_MEMORY)
        outline = _corners(curve, timeline, layout.time, axis)
        canvas.steps([(_LEFT, low), *outline, (outline[-1][0], low)], class_="largest")
        budget = layout.own_bytes[rank] if rank < len(layout.own_bytes) else 0.0
        canvas.line(_LEFT, axis(budget), _WIDTH - _RIGHT, axis(budget), class_="budget")
        canvas.words(_LEFT - 8, low - 12, f"memory {rank}", class_="end")
        canvas.words(_LEFT - 8, low - 1, layout.units.of_memory(timeline.peak_bytes[rank]), class_="end")


def _corners(
    curve: Sequence[tuple[float, float]], timeline: Timeline, time: Axis, memory: Axis
) -> list[tuple[float, float]]:
    """The places of the changes of a curve that holds each value up to the next one, to the end of the step."""
    changes = {0.0: 0.0, **dict(curve)}  # of changes at one moment, the last
    changes.setdefault(timeline.step_seconds, curve[-1][1] if curve else 0.0)
    return [(time(seconds), memory(amount)) for seconds, amount in changes.items()]


def _times(canvas: Canvas, layout: _Layout, bottom: float) -> None:
    """[4]"""
    canvas.words(_LEFT - 8, bottom + 16, "time", class_="end")
    canvas.line(_LEFT, bottom, _WIDTH - _RIGHT, bottom, class_="axis")
    ticks = layout.time.ticks(10, layout.units.seconds)
    for tick in ticks:
        text = layout.units.of_time(tick) if tick == ticks[-1] else number(tick / layout.units.seconds)
        canvas.line(layout.time(tick), bottom, layout.time(tick), bottom + 4, class_="axis")
        canvas.words(layout.time(tick), bottom + 16, text, class_="middle")


def _legend(canvas: Canvas, timelines: Sequence[Timeline], layout: _Layout, top: float) -> float:
    """[5]; where it ends."""
    x, y = _LEFT, top + 8
    for style, text in _entries(timelines, layout):
        width = 34 + len(text) * 11 * 0.55
        if x + width > _WIDTH and x > _LEFT:
            x, y = _LEFT, y + 18
        _key(canvas, style, x, y)
        canvas.words(x + 18, y, text)
        x += width
    return y + 16


def _entries(timelines: Sequence[Timeline], layout: _Layout) -> list[tuple[str, str]]:
    present = {event.action.kind.value for timeline in timelines for event in timeline.events}
    entries = [(kind, name) for kind, name in _NAMES.items() if kind in present]
    if {"B", "I"} <= present:  # of one colour
        entries = [(kind, "backward, input gradient" if kind == "B" else name) for kind, name in entries if kind != "I"]
    if any(_arrivals(timeline, rank) for timeline in timelines for rank in range(len(timeline.schedule.ranks))):
        entries.append(("arrival", "a gradient arrives"))
    if layout.show_copies:
        entries += [("there", "an activation on its way"), ("back", "a gradient on its way")]
    if not layout.show_memory:
        return entries
    if layout.own_bytes:
        return [*entries, ("largest", "memory of a rank, and its peak"), ("budget", "its budget")]
    if any(1 < len(timeline.memory) <= _FEW_RANKS for timeline in timelines):
        entries += [("largest", "memory where it peaks"), ("curve", "on other ranks")]
    else:
        entries.append(("largest", "memory of the rank that needs most"))
    if layout.budget_bytes is not None:
        entries.append(("budget", f"budget {layout.units.of_memory(layout.budget_bytes)}"))
    return entries


def _key(canvas: Canvas, style: str, x: float, y: float) -> None:
    if style == "arrival":
        canvas.line(x + 6, y - 9, x + 6, y + 1, class_=style)
    elif style == "budget":
        canvas.line(x - 2, y - 4, x + 14, y - 4, class_=style)
    elif style in ("largest", "curve"):
        canvas.steps([(x, y + 1), (x, y - 7), (x + 12, y + 1)], class_=style)
    else:
        canvas.rectangle(x, y - 9, 12, 10, class_=f"{style} key")
