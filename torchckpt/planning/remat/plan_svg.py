"""Plan SVG: the memory of one step as SVG, with and without recompute, and what is recomputed when.

 [1] what recompute buys, in words
 [2] title, budget, recompute
 ┌ [3] ─────────────────────────────────┐ [4] eager peak
 │ bytes alive over time, coloured by   │ [4] budget
 │ what runs; eager in grey behind      │ [4] planned peak
 └──────────────────────────────────────┘
   [5] time
   [6] forward │ backward
   [7] recomputed: one box a repeat
 [8] legend
"""
from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple, TypeAlias

from torchckpt.errors import called
from torchckpt.planning.draw.canvas import CHARACTER, STYLE, TEXT, Axis, Canvas, clipped
from torchckpt.planning.draw.units import units_of_bytes
from torchckpt.planning.remat.flow.dataflow import Dataflow, Schedule, first_runs
from torchckpt.planning.remat.flow.dataflow import runs as operations_of
from torchckpt.planning.remat.flow.memory import simulate

__all__ = ["Run", "Span", "draw_plan", "kinds", "runs", "thinned"]

_STYLE = STYLE + """
.fill{fill-opacity:.8} .eager{fill:#e5e7eb;stroke:#9ca3af;stroke-width:1} .outline{fill:none;stroke:#111827}
.leader{stroke:#9ca3af;stroke-width:1;stroke-dasharray:1 3} .leader.after{stroke:#111827}
.red{fill:#c0392b} .bold{font-weight:600;fill:#111827}
.dot{fill:#111827} .dot.grey{fill:#6b7280}
"""
_KINDS = {"F": "forward", "B": "backward", "R": "recomputed"}
_WIDTH, _LEFT, _RIGHT = 960.0, 92.0, 158.0
_END = _WIDTH - _RIGHT
_TOP, _BOTTOM = 78.0, 338.0  # of the chart
_LANES = _BOTTOM + 42
_FINEST, _FINEST_KIND = 1.0, 5.0  # pixels: of the curve, and of stripes of two colours
_LINE = 14.0  # from one line of text to the next
_LONGEST_TITLE = 60


@called("draw_plan()")
def draw_plan(flow: Dataflow, schedule: Schedule, *, budget_bytes: int | None = None, title: str) -> str:
    """Bytes alive while ``schedule`` runs, before those of the eager step, on one time scale, as a document for a file.

    The picture stays small however long a schedule is: of steps that are shorter than a pixel, the highest is drawn. At
    ``budget_bytes``, if given, a line goes across. ``title``: what the picture is of, below what it shows; clipped if
    long. An ArgumentError, if the schedule is none of this dataflow.
    """
    plan = _Plan(flow, schedule, budget_bytes)
    canvas = Canvas(_WIDTH)
    finding, facts = plan.finding, f"{clipped(title, _LONGEST_TITLE)}: {plan.facts}"
    canvas.headed(_LEFT, finding, facts)
    _axes(canvas, plan)
    _curves(canvas, plan)
    _levels(canvas, plan)
    return canvas.text(canvas.legend(_entries(plan), _LEFT, _lanes(canvas, plan) + 26), f"{finding}; {facts}", _STYLE)


class Run(NamedTuple):
    """One run of an operation of a traced step: from when to when, and the bytes alive meanwhile."""

    operation: int
    start_seconds: float
    end_seconds: float
    bytes: int
    in_forward: bool
    is_repeat: bool

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds

    @property
    def kind(self) -> str:
        """``F``, ``B``, or ``R`` of a repeat."""
        return "R" if self.is_repeat else "F" if self.in_forward else "B"


class Span(NamedTuple):
    """A time in which runs of one kind are drawn."""

    kind: str
    start_seconds: float
    end_seconds: float


def runs(flow: Dataflow, schedule: Schedule) -> list[Run]:
    """The steps of ``schedule``. Where no operation takes time, each run takes one second."""
    memory, firsts, timed = simulate(flow, schedule), first_runs(schedule), flow.seconds > 0
    seconds = [operation.seconds if timed else 1.0 for operation in operations_of(flow, schedule)]
    starts = accumulate(seconds, initial=0.0)
    return [
        Run(index, start, end, alive, step < memory.boundary, firsts[index] != step)
        for step, (index, (start, end), alive) in enumerate(zip(schedule, pairwise(starts), memory.bytes_during))
    ]


def thinned(every: Iterable[Run], finest_seconds: float) -> list[list[Run]]:
    """Neighbours in groups: shorter ones together until they last ``finest_seconds``, longer ones alone.

    A group is in the forward or in the backward. Drawn as high as its highest run, it shows every peak.
    """
    groups: list[list[Run]] = []
    for run in every:
        group = groups[-1] if groups else []
        is_short = group and max(group[-1].end_seconds - group[0].start_seconds, run.seconds) < finest_seconds
        if is_short and group[0].in_forward == run.in_forward:
            group.append(run)
        else:
            groups.append([run])
    return groups


def kinds(every: Iterable[Run], finest_seconds: float) -> list[Span]:
    """The kinds that run, and when. Where they alternate faster than ``finest_seconds``, repeats come first."""
    alike = (list(group) for _, group in groupby(every, lambda run: (run.kind, run.in_forward)))
    phases = [group[0]._replace(end_seconds=group[-1].end_seconds) for group in alike]
    listed: list[Span] = []
    for group in thinned(phases, finest_seconds):
        now = group[0].start_seconds
        for kind, members in groupby(sorted(group, key=lambda run: not run.is_repeat), lambda run: run.kind):
            end = now + sum(run.seconds for run in members)
            listed.append(Span(kind, now, end))
            now = end
    return listed


_Stretch: TypeAlias = tuple[float, float, float]
"""A stretch of a curve: it goes from x to x, at the height y."""


class _Plan:
    """A plan as it is drawn, with its scales."""

    def __init__(self, flow: Dataflow, schedule: Schedule, budget_bytes: int | None) -> None:
        self.runs, self.eager, self.budget_bytes = runs(flow, schedule), runs(flow, flow.eager), budget_bytes
        self.is_change = self.runs != self.eager
        self.repeats = [run for run in self.runs if run.is_repeat]
        self.peak, self.eager_peak = _highest(self.runs), _highest(self.eager)
        ends = [run.end_seconds for run in (*self.runs[-1:], *self.eager[-1:])]
        self.time = Axis(max(ends, default=0.0), _LEFT, _END)
        self.memory = Axis(max(self.peak.bytes, self.eager_peak.bytes, budget_bytes or 0) * 1.08, _BOTTOM, _TOP)
        time, seconds = ("%", flow.seconds / 100) if flow.seconds > 0 else ("operations", 1.0)
        self.units = replace(units_of_bytes(self.memory.extent, time, seconds), digits=3)
        self.kinds = kinds(self.runs, self.seconds_of(_FINEST_KIND))

    def seconds_of(self, pixels: float) -> float:
        return self.time.extent * pixels / (_END - _LEFT)

    @property
    def finding(self) -> str:
        """[1]"""
        peak, eager, of_memory = self.peak.bytes, self.eager_peak.bytes, self.units.of_memory
        if not self.is_change:
            return f"Peak memory {of_memory(peak)}"
        change = f" ({(peak / eager - 1) * 100:+.1f} %)" if eager else ""
        repeated = sum(run.seconds for run in self.repeats)
        once = self.runs[-1].end_seconds - repeated if self.repeats else 0.0
        cost = f", for {repeated / once * 100:.1f} % more time" if repeated and once else ""
        return f"Peak memory {of_memory(peak)} in place of {of_memory(eager)}{change}{cost}"

    @property
    def facts(self) -> str:
        """[2]"""
        facts = []
        if self.budget_bytes is not None:
            over = self.peak.bytes - self.budget_bytes
            budget = f"budget of {self.units.of_memory(self.budget_bytes)}"
            facts.append(f"{self.units.of_memory(over)} over the {budget}" if over > 0 else f"within the {budget}")
        number = len(self.repeats)
        recomputed = f"{number} operation{'s' if number > 1 else ''} recomputed" if number else "nothing is recomputed"
        return ", ".join((*facts, recomputed))


def _highest(every: Sequence[Run]) -> Run:
    return max(every, key=lambda run: run.bytes, default=Run(-1, 0.0, 0.0, 0, True, False))


def _axes(canvas: Canvas, plan: _Plan) -> None:
    """[3], [5]"""
    units = plan.units
    canvas.grid(plan.memory, _LEFT, _END, units.bytes, 5)
    canvas.upright(20, (_TOP + _BOTTOM) / 2, f"memory, {units.memory}", "middle")
    canvas.scale(plan.time, _BOTTOM, units.seconds)
    unit = "% of the eager step" if units.time == "%" else units.time
    canvas.words((_LEFT + _END) / 2, _BOTTOM + 33, f"time, {unit}", class_="middle")


def _curves(canvas: Canvas, plan: _Plan) -> None:
    """[3]"""
    if plan.is_change and plan.eager:
        canvas.steps(_under(_profile(plan, plan.eager)), class_="eager")
    profile = _profile(plan, plan.runs)
    if profile:
        canvas.steps(_under(profile), class_="paper")
        for kind in plan.kinds:
            part = _between(profile, plan.time(kind.start_seconds), plan.time(kind.end_seconds))
            if part:
                canvas.steps(_under(part), class_=f"{kind.kind} fill")
        canvas.steps(_under(profile), class_="outline")


def _profile(plan: _Plan, every: Sequence[Run]) -> list[_Stretch]:
    return [
        (plan.time(group[0].start_seconds), plan.time(group[-1].end_seconds), plan.memory(max(r.bytes for r in group)))
        for group in thinned(every, plan.seconds_of(_FINEST))
    ]


def _between(profile: Sequence[_Stretch], start: float, end: float) -> list[_Stretch]:
    first = bisect_right(profile, start, key=lambda part: part[1])
    last = bisect_left(profile, end, key=lambda part: part[0])
    return [(max(x, start), min(to, end), y) for x, to, y in profile[first:last]]


def _under(profile: Sequence[_Stretch]) -> list[tuple[float, float]]:
    """The corners of the area under a curve."""
    corners = [(profile[0][0], _BOTTOM), *((x, y) for x, _, y in profile)]
    return [*corners, (profile[-1][1], corners[-1][1]), (profile[-1][1], _BOTTOM)]


def _levels(canvas: Canvas, plan: _Plan) -> None:
    """[4]"""
    peak, eager, of_memory = plan.peak.bytes, plan.eager_peak.bytes, plan.units.of_memory
    levels = [(peak, f"peak {of_memory(peak)}", "bold")]
    if plan.is_change:
        levels.append((eager, f"eager peak {of_memory(eager)}", ""))
    if plan.budget_bytes is not None:
        levels.append((plan.budget_bytes, f"budget {of_memory(plan.budget_bytes)}", "red"))
    levels.sort(key=lambda level: -level[0])
    y = _TOP - _LINE
    for bytes_, text, style in levels:
        height = plan.memory(bytes_)
        y = max(height, y + _LINE)
        canvas.line(_END, height, _END + 9, y, class_="axis")
        canvas.words(_END + 12, y + 4, text, class_=style)
    if plan.is_change:
        _peak(canvas, plan, plan.eager_peak, "grey")
    if plan.budget_bytes is not None:
        height = plan.memory(plan.budget_bytes)
        canvas.line(_LEFT, height, _END, height, class_="budget")
    _peak(canvas, plan, plan.peak, "after")


def _peak(canvas: Canvas, plan: _Plan, peak: Run, style: str) -> None:
    x, y = plan.time((peak.start_seconds + peak.end_seconds) / 2), plan.memory(peak.bytes)
    canvas.line(x, y, _END, y, class_=f"leader {style}")
    canvas.rectangle(x - 3, y - 3, 6, 6, rx=3, class_=f"dot {style}")


def _lanes(canvas: Canvas, plan: _Plan) -> float:
    """[6], [7]; where they end."""
    for is_forward, members in groupby(plan.runs, lambda run: run.in_forward):
        phase = list(members)
        x, end = plan.time(phase[0].start_seconds), plan.time(phase[-1].end_seconds)
        kind, name, shade = ("F", "forward", "dark") if is_forward else ("B", "backward", "light")
        canvas.rectangle(x, _LANES, end - x, 15, class_=f"{kind} phase")
        if len(name) * TEXT * CHARACTER < end - x:
            canvas.words((x + end) / 2, _LANES + 11, name, class_=f"middle {shade}")
    if not plan.repeats:
        return _LANES + 15
    y = _LANES + 20
    canvas.words(_LEFT - 8, y + 12, "recomputed", class_="end")
    repeated = [(plan.time(kind.start_seconds), plan.time(kind.end_seconds)) for kind in plan.kinds if kind.kind == "R"]
    canvas.boxes(((start, y, end - start, 14) for start, end in repeated), class_="R repeated")
    return y + 14


def _entries(plan: _Plan) -> Iterator[tuple[str, str]]:
    """[8]"""
    present = {run.kind for run in plan.runs}
    yield from ((kind, name) for kind, name in _KINDS.items() if kind in present)
    if plan.is_change:
        yield "eager", "eager: nothing recomputed"
    if plan.budget_bytes is not None:
        yield "budget", "budget"
