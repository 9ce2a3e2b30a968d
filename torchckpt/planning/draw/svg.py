"""SVG: the step as a Gantt chart, when gradients arrive, and below it the memory that it takes, on one time scale.

 [0] title, subtitle
 ┌ panel, one per timeline ──────────────────────────────────────────────────┐
 │ [1] name: step, change, idle, peak                                        │
 │     lines at moments, such as the step without recomputation              │
 │ [2] stage 0 │ boxes: F, R, B (or I and W); a tick above a row: a gradient │
 │     stage 1 │ has arrived there                                           │
 │     copies  │ if asked for: what leaves the stage, under its row          │
 │     host    │ if there is one: what is copied to it, and below what back  │
 │ [3] memory, of the ranks, then of their hosts                             │
 │ [4] time                                                                  │
 └───────────────────────────────────────────────────────────────────────────┘
 [5] legend
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from torchckpt.planning.draw.canvas import CHARACTER, STYLE, Axis, Canvas, clipped
from torchckpt.planning.draw.units import KIND_NAMES, Units, label, percent, row_name
from torchckpt.planning.figures import Message, TimelineFigures
from torchckpt.planning.order.schedule import Kind

__all__ = ["svg"]

_WIDTH, _LEFT, _RIGHT = 960.0, 84.0, 24.0
_END = _WIDTH - _RIGHT
_ARRIVALS, _WIRE = 5.0, 9.0  # ticks above a row; a row of messages in one direction
_FEW_RANKS = 8  # of more, only the curve that peaks is drawn
_CAPTION, _TOGETHER = 24.0, 72.0
_SINGLE, _APART = 40.0, 6.0  # the curve of one rank, where each is drawn by itself
_DIGITS = 3  # of a number in a picture
_STYLE = STYLE + """
.idle{fill:#eef0f3} .arrival{stroke:#111827;stroke-width:1.3} .curve{fill:none;stroke:#9ca3af;stroke-width:1}
.moment{stroke:#111827;stroke-width:1.2;stroke-dasharray:4 3} .there{fill:#9fd3f2} .back{fill:#6b8fc9}
.largest{fill:#cc79a7;fill-opacity:.28;stroke:#8f3b6c;stroke-width:1.4}
.out{fill:#d55e00} .in{fill:#7a6fbf} .host{fill:#7a6fbf;fill-opacity:.2;stroke:#544a99;stroke-width:1.4}
"""
_SHADES = dict.fromkeys("BIW", "light")  # of words on these kinds
_TITLE, _TIMES = 32.0, 38.0
_LINE = 16.0  # of text
_LETTER = 0.6  # wide, in sizes of the font

Curve: TypeAlias = "Sequence[tuple[float, float]]"
"""Bytes over time, at each change."""
_Crossing: TypeAlias = "tuple[Message, int, int]"
"""A message from one rank to another, with the two ranks."""


def svg(
    *timelines: TimelineFigures,
    names: Sequence[str] = (),
    budget_bytes: float | Sequence[float] | None = None,
    units: Units | None = None,
    copies: bool = False,
    title: str = "",
    subtitle: str = "",
    lines: Sequence[Mapping[str, float]] = (),
    stage_names: Sequence[str] = (),
) -> str:
    """One panel per timeline, one over the other, on the same scales of time and memory. The memory is left out where
    it says nothing: where no timeline has any, and where each curve is 0 or one and the same amount.

    >>> text = svg(simulate(gpipe(2, 4)), budget_bytes=3)  # for Path("step.svg").write_text(text, encoding="utf-8")

    Args:
        timelines: what to draw, from the top; from the second on, the title says the change from the first.
        names: of the timelines; by default those of their schedules.
        budget_bytes: where to draw a line across the memory; by default nowhere. Of a list, with one for each rank,
            the memory of each rank is drawn by itself, under its line.
        units: how to write times and memory; by default time is a bare number, memory counts in A.
        copies: under the row of each rank, one for the activations and one for the gradients that it sends to others.
        title, subtitle: above all panels: what the picture shows, in words, and of what.
        lines: per timeline, by name the seconds at which to draw lines down its panel.
        stage_names: what is written on the boxes of each stage, in place of action and micro-batch; where a name does
            not fit, what follows its last dot.
    """
    layout = _Layout(timelines, budget_bytes, units or Units(), copies, lines, stage_names)
    canvas = Canvas(_WIDTH)
    y, titles = canvas.headed(_LEFT, title, subtitle), [title] if title else []
    for index, timeline in enumerate(timelines):
        name = names[index] if index < len(names) else f"{timeline.schedule.name}, {timeline.schedule.counts}"
        facts = _facts(timeline, timelines[0] if index else None, layout.units)
        titles.append(f"{name}: {facts}")
        y = _panel(canvas, timeline, (name, facts), layout, y, lines[index] if index < len(lines) else {})

    def key(style: str, x: float, y: float) -> None:
        if style == "arrival":
            canvas.line(x + 6, y - 9, x + 6, y + 1, class_=style)
        elif style in ("largest", "curve"):
            canvas.steps([(x, y + 1), (x, y - 7), (x + 12, y + 1)], class_=style)
        else:
            canvas.key(style, x, y)

    return canvas.text(canvas.legend(_entries(timelines, layout), _LEFT, y + 8, key), "; ".join(titles), _STYLE)


class _Layout:
    """What all panels of a picture share. ``bytes_of_ranks`` is empty where there is one budget for all ranks."""

    def __init__(
        self, timelines: Sequence[TimelineFigures], budget: float | Sequence[float] | None, units: Units,
        show_copies: bool, lines: Sequence[Mapping[str, float]], stage_names: Sequence[str]
    ) -> None:
        self.units, self.show_copies, self.stage_names = replace(units, digits=_DIGITS), show_copies, stage_names
        self.bytes_of_ranks = tuple(budget) if isinstance(budget, Sequence) else ()
        self.budget_bytes = max(budget, default=None) if isinstance(budget, Sequence) else budget
        ends = [timeline.step_seconds for timeline in timelines]
        ends += [end for moments in lines for end in moments.values()]
        self.time = Axis(max(ends, default=0.0), _LEFT, _END)
        ranks = max((len(timeline.schedule.ranks) for timeline in timelines), default=1)
        self.row_height = min(24.0, max(5.0, 200.0 / max(ranks, 1)))
        on_hosts = [amount for timeline in timelines for curve in timeline.host_memory for _, amount in curve]
        self.host_bytes = max(on_hosts, default=0.0) * 1.12
        self.show_labels = all(_most_labels_fit(timeline, self.time, self.row_height) for timeline in timelines)
        peaks = [peak for timeline in timelines for peak in timeline.peak_bytes]
        self.memory_bytes = max(*peaks, self.budget_bytes or 0.0, 0.0) * 1.12
        # Where each curve is 0 or one and the same amount, it says no more than the peak in words.
        amounts = {amount for timeline in timelines for curve in timeline.memory for _, amount in curve if amount}
        has_line = bool(amounts and self.budget_bytes is not None)
        self.show_memory = not timelines or len(amounts) > 1 or has_line

    def pitch(self, timeline: TimelineFigures) -> float:
        """The height from one rank to the next."""
        return _ARRIVALS + self.row_height + 2 * _WIRE * (self.show_copies + bool(timeline.copies))


def _most_labels_fit(timeline: TimelineFigures, time: Axis, height: float) -> bool:
    labels = [(label(timeline.schedule, event.action), event) for event in timeline.events]
    widths = [_box(time, event.start_seconds, event.end_seconds)[1] for _, event in labels]
    fitting = sum(_fits(text, width, height) for (text, _), width in zip(labels, widths))
    return 2 * fitting >= len(labels)


def _box(time: Axis, start_seconds: float, end_seconds: float) -> tuple[float, float]:
    """Where a box begins, and its width; a sliver of white parts it from the next."""
    start, end = time(start_seconds), time(end_seconds)
    return start, (end - start) - min(1.0, 0.15 * (end - start))


def _fits(text: str, width: float, height: float) -> bool:
    return height >= 11 and len(text) * CHARACTER * _label_size(height) <= width - 2


def _label_size(height: float) -> float:
    """The size of the font of labels in boxes."""
    return min(11.5, height * 0.72)


def _facts(timeline: TimelineFigures, first: TimelineFigures | None, units: Units) -> str:
    """[1]"""
    step, idle, peaks = timeline.step_seconds, timeline.idle_share, timeline.peak_bytes
    change = f" ({step / first.step_seconds * 100 - 100:+.1f} %)" if first and first.step_seconds else ""
    mean = sum(idle) / len(idle) if idle else 0.0
    peak = f", peak {units.of_memory(max(peaks, default=0.0))}" if any(timeline.memory) or not peaks else ""
    return f"step {units.of_time(step)}{change}, idle {percent(mean)}{peak}"


def _panel(
    canvas: Canvas, timeline: TimelineFigures, title: tuple[str, str], layout: _Layout, top: float,
    lines: Mapping[str, float]
) -> float:
    """Draw ``timeline`` from ``top`` on; where the next panel begins."""
    name, facts = title
    room = _END - _LEFT - (len(facts) + 1) * 14 * _LETTER
    canvas.words(_LEFT, top + 22, clipped(name, int(room / (15 * _LETTER))), class_="name")
    canvas.words(_END, top + 22, facts, class_="facts end")
    rows = top + _TITLE + len(lines) * _LINE
    ends = rows + len(timeline.schedule.ranks) * layout.pitch(timeline)
    middle = ends + _memory_height(timeline, layout)
    bottom = middle + len(timeline.host_memory) * (_SINGLE + _APART)
    for tick in layout.time.ticks(10, layout.units.seconds):
        canvas.line(layout.time(tick), rows, layout.time(tick), bottom, class_="grid")
    _rows(canvas, timeline, layout, rows)
    if layout.show_memory:
        (_memory_of_each if layout.bytes_of_ranks else _memory)(canvas, timeline, layout, middle)
    _memory_of_each(canvas, timeline, layout, bottom, of_hosts=True)
    _moments(canvas, layout, lines, rows, ends)
    unit = layout.units.time
    canvas.words(_LEFT - 8, bottom + 17, f"time, {unit}" if unit else "time", class_="end")
    canvas.scale(layout.time, bottom, layout.units.seconds)  # [4]
    return bottom + _TIMES


def _moments(canvas: Canvas, layout: _Layout, lines: Mapping[str, float], top: float, bottom: float) -> None:
    """Each line has its name beside its upper end, the last one highest, so that no line crosses a name."""
    for place, (name, seconds) in enumerate(sorted(lines.items(), key=lambda line: line[1])):
        x, y = layout.time(seconds), top - (place + 1) * _LINE
        is_left = x > (_LEFT + _WIDTH) / 2
        canvas.line(x, y + 2, x, bottom, class_="moment")
        text = f"{name} {layout.units.of_time(seconds)}"
        canvas.words(x - 5 if is_left else x + 5, y + 12, text, class_="end" if is_left else "start")


def _rows(canvas: Canvas, timeline: TimelineFigures, layout: _Layout, top: float) -> None:
    """[2]"""
    pitch, has_below = layout.pitch(timeline), layout.show_copies or bool(timeline.copies)
    every = -(-(28 if has_below else 15) // int(pitch))  # rows from one name to the next, so that none touch
    crossing = _crossing(timeline)
    arrivals = _arrivals(crossing)
    for rank in range(len(timeline.schedule.ranks)):
        y = top + rank * pitch + _ARRIVALS
        canvas.rectangle(_LEFT, y, layout.time(timeline.step_seconds) - _LEFT, layout.row_height, class_="idle")
        if rank % every == 0:
            name = row_name(timeline.schedule, rank)
            canvas.words(_LEFT - 8, y + layout.row_height / 2 + 5, name, class_="end")
        _boxes(canvas, timeline, rank, layout, y)
        below = [("copies", y + layout.row_height + 1, _sent(crossing, rank))] * layout.show_copies
        below += [("host", y + pitch - _ARRIVALS - 2 * _WIRE + 1, _moved(timeline, rank))] * bool(timeline.copies)
        for name, start, ways in below:
            if every == 1:
                canvas.words(_LEFT - 8, start + _WIRE, name, class_="end")
            for number, (style, times) in enumerate(ways.items()):
                spans = [_box(layout.time, *each) for each in times]
                boxes = [(x, start + number * _WIRE, width, _WIRE - 2) for x, width in spans]
                if boxes:
                    canvas.boxes(boxes, class_=style)
        arrived = [(layout.time(seconds), y - _ARRIVALS + 0.5) for to, seconds in arrivals if to == rank]
        if arrived:
            canvas.ticks(arrived, _ARRIVALS - 0.5, class_="arrival")


def _boxes(canvas: Canvas, timeline: TimelineFigures, rank: int, layout: _Layout, y: float) -> None:
    height, size = layout.row_height, _label_size(layout.row_height)
    events = [event for event in timeline.events if event.rank == rank]
    places = [_box(layout.time, event.start_seconds, event.end_seconds) for event in events]
    by_kind: dict[str, list[tuple[float, float, float, float]]] = {}
    for event, (x, width) in zip(events, places):
        by_kind.setdefault(event.action.kind.value, []).append((x, y, width, height))
    for kind, boxes in by_kind.items():
        canvas.boxes(boxes, class_=kind)
    for event, (x, width) in zip(events, places) if layout.show_labels else ():
        shade = _SHADES.get(event.action.kind.value, "dark")
        texts = [label(timeline.schedule, event.action)]
        if layout.stage_names:
            name = layout.stage_names[event.action.stage]
            texts = [name, name.rpartition(".")[2]]
        text = next((text for text in texts if _fits(text, width, height)), "")
        if text:
            place = (x + width / 2, y + height / 2 + size * 0.36)
            canvas.words(*place, text, class_=f"middle {shade}", style=f"font-size:{size:g}px")


def _sent(crossing: Sequence[_Crossing], rank: int) -> dict[str, list[tuple[float, float]]]:
    """The times of what ``rank`` sends to others: activations, and under them gradients."""
    times: dict[str, list[tuple[float, float]]] = {"there": [], "back": []}
    for message in (message for message, sender, _ in crossing if sender == rank):
        way = "there" if message.action.kind is Kind.FORWARD else "back"
        times[way].append((message.sent_seconds, message.arrived_seconds))
    return times


def _moved(timeline: TimelineFigures, rank: int) -> dict[str, list[tuple[float, float]]]:
    """The times of what is copied from ``rank`` to its host, and under it of what is copied back."""
    times: dict[str, list[tuple[float, float]]] = {"out": [], "in": []}
    for copy in (copy for copy in timeline.copies if copy.rank == rank):
        times["in" if copy.is_back else "out"].append((copy.start_seconds, copy.end_seconds))
    return times


def _crossing(timeline: TimelineFigures) -> list[_Crossing]:
    """The messages from one rank to another, with the two ranks."""
    placement = timeline.schedule.placement
    ways = [(message, placement[message.action.stage], placement[message.to_stage]) for message in timeline.messages]
    return [way for way in ways if way[1] != way[2]]


def _arrivals(crossing: Sequence[_Crossing]) -> list[tuple[int, float]]:
    """The ranks to which gradients come from others, and when."""
    kinds = (Kind.BACKWARD, Kind.INPUT_GRAD)
    return [(to, message.arrived_seconds) for message, _, to in crossing if message.action.kind in kinds]


def _memory_height(timeline: TimelineFigures, layout: _Layout) -> float:
    """The height of [3], with what stands above it."""
    if not layout.show_memory:
        return 4.0
    return 14.0 + len(timeline.memory) * (_SINGLE + _APART) if layout.bytes_of_ranks else _CAPTION + _TOGETHER


def _memory(canvas: Canvas, timeline: TimelineFigures, layout: _Layout, bottom: float) -> None:
    """[3]: the curve of the rank that needs most, and of few ranks all of them."""
    units, peaks = layout.units, timeline.peak_bytes
    axis = Axis(layout.memory_bytes, bottom, bottom - _TOGETHER)
    canvas.grid(axis, _LEFT, _END, units.bytes, 4)
    unit = units.many or units.memory
    canvas.words(_LEFT, bottom - _TOGETHER - 2, f"memory, {unit}" if unit else "memory")
    largest = max(range(len(peaks)), key=peaks.__getitem__, default=None)
    for rank, curve in enumerate(timeline.memory):
        if rank != largest and len(timeline.memory) <= _FEW_RANKS:
            canvas.steps(_corners(curve, timeline, layout.time, axis), class_="curve")
    if largest is not None:
        _area(canvas, timeline, timeline.memory[largest], layout.time, axis)
    if layout.budget_bytes is not None:
        _budget(canvas, axis(layout.budget_bytes))


def _memory_of_each(
    canvas: Canvas, timeline: TimelineFigures, layout: _Layout, bottom: float, of_hosts: bool = False
) -> None:
    """[3], where each rank has its own budget, and ``of_hosts``: one curve below the other."""
    curves = timeline.host_memory if of_hosts else timeline.memory
    name, style, most = ("host", "host", layout.host_bytes) if of_hosts else ("memory", "largest", layout.memory_bytes)
    for rank, curve in enumerate(curves):
        low = bottom - (len(curves) - rank - 1) * (_SINGLE + _APART)
        axis = Axis(most, low, low - _SINGLE)
        _area(canvas, timeline, curve, layout.time, axis, style)
        if not of_hosts:
            _budget(canvas, axis(layout.bytes_of_ranks[rank] if rank < len(layout.bytes_of_ranks) else 0.0))
        canvas.words(_LEFT - 8, low - 16, f"{name} {rank}", class_="end")
        peak = max((amount for _, amount in curve), default=0.0)
        canvas.words(_LEFT - 8, low - 2, layout.units.of_memory(peak), class_="end")


def _area(
    canvas: Canvas, timeline: TimelineFigures, curve: Curve, time: Axis, memory: Axis, style: str = "largest"
) -> None:
    outline = _corners(curve, timeline, time, memory)
    canvas.steps([(_LEFT, memory.start), *outline, (outline[-1][0], memory.start)], class_=style)


def _budget(canvas: Canvas, y: float) -> None:
    canvas.line(_LEFT, y, _END, y, class_="budget")


def _corners(curve: Curve, timeline: TimelineFigures, time: Axis, memory: Axis) -> list[tuple[float, float]]:
    """The places of the changes of a curve that holds each value up to the next one, to the end of the step."""
    changes = {0.0: 0.0, **dict(curve)}  # of changes at one moment, the last
    changes.setdefault(timeline.step_seconds, curve[-1][1] if curve else 0.0)
    return [(time(seconds), memory(amount)) for seconds, amount in changes.items()]


def _entries(timelines: Sequence[TimelineFigures], layout: _Layout) -> list[tuple[str, str]]:
    present = {event.action.kind.value for timeline in timelines for event in timeline.events}
    entries = [(kind, name) for kind, name in KIND_NAMES.items() if kind in present]
    if {"B", "I"} <= present:  # of one colour
        entries = [(kind, "backward, input gradient" if kind == "B" else name) for kind, name in entries if kind != "I"]
    if any(_arrivals(_crossing(timeline)) for timeline in timelines):
        entries.append(("arrival", "a gradient arrives"))
    if layout.show_copies:
        entries += [("there", "an activation on its way"), ("back", "a gradient on its way")]
    if any(timeline.copies for timeline in timelines):
        entries += [("out", "a block on its way to the host"), ("in", "on its way back"), ("host", "bytes on the host")]
    if not layout.show_memory:
        return entries
    if layout.bytes_of_ranks:
        of = " of a rank" if len(layout.bytes_of_ranks) > 1 else ""
        return [*entries, ("largest", f"memory{of}, and its peak"), ("budget", "its budget")]
    if any(1 < len(timeline.memory) <= _FEW_RANKS for timeline in timelines):
        entries += [("largest", "memory where it peaks"), ("curve", "on other ranks")]
    else:
        entries.append(("largest", "memory of the rank that needs most"))
    if layout.budget_bytes is not None:
        entries.append(("budget", f"budget {layout.units.of_memory(layout.budget_bytes)}"))
    return entries
