"""Table: named steps side by side, beside the one that recomputes nothing, and the bound; paper or measured."""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from os import PathLike
from typing import Any

from torchckpt.errors import Fault, called, check
from torchckpt.planning.draw.svg import svg
from torchckpt.planning.draw.units import Units, aligned, percent, units_of_clock
from torchckpt.planning.figures import Drawn, Row, overhead
from torchckpt.planning.order.schedule import Schedule, whole
from torchckpt.planning.order.validity import check_schedule
from torchckpt.planning.step.bound import bound_of
from torchckpt.planning.step.placement import recomputed_early, with_recompute, without
from torchckpt.planning.step.quickest import quickest_of
from torchckpt.planning.step.simulated import Step, step_of
from torchckpt.planning.step.timeline import Timeline
from torchckpt.planning.work.block import Block, Links, Stages
from torchckpt.planning.work.choice import EXEMPTIONS, Choices, ahead, arrival, exempt, none

__all__ = [
    "AS_GIVEN", "POLICIES", "Comparison", "Report", "TimedRow", "compare", "in_words", "policy_faults", "report",
    "step_named", "table_of",
]

_KEPT = ("", *(f"/{kept}" for kept in EXEMPTIONS))
POLICIES = ("none", *(when + kept for when in ("arrival", "ahead") for kept in _KEPT))
AS_GIVEN = "as given"
"""The row of a schedule that came with recomputes of its own."""

_POLICY = re.compile(rf"none|(arrival|ahead(?::(\d+))?)(?:/({'|'.join(EXEMPTIONS)}))?")
_WORDS = {
    None: ("nothing recomputed", "Recomputing nothing"),
    "arrival": ("recomputed when the gradient arrives", "Recomputing when gradients arrive"),
    "ahead": ("recomputed ahead of the gradient", "Recomputing ahead of gradients"),
}
_DRAWN = Units(memory="micro-batch", many="micro-batches")


def table_of(rows: Iterable[Row], units: Units, head: str = "") -> str:
    """The table for people: names are on the left, numbers on the right of their columns. ``head``: what the names are.
    """
    cells = [(head, "step", "overhead", "bound", "hidden", "peak")]
    for row in rows:
        step, hidden = units.of_time(row.step_seconds), "-" if row.hidden is None else f"{row.hidden:.2f}"
        peak = units.of_memory(max(row.peak_bytes)) if row.peak_bytes else "-"
        cells.append((row.name, step, percent(row.overhead), percent(row.bound), hidden, peak))
    return aligned(cells)


@dataclass(frozen=True)
class TimedRow(Row):
    """A row whose step can be drawn."""

    timeline: Timeline

    @property
    def moments(self) -> dict[str, float]:
        """The lines down its picture, by name."""
        return {"no recomputation": self.none_seconds, "bound": self.bound_seconds}

    def as_json(self) -> dict[str, Any]:
        idle = self.timeline.idle_share
        return {
            "recompute": self.name,
            "step_seconds": self.step_seconds,
            "overhead": self.overhead,
            "bound": self.bound,
            "hidden": self.hidden,
            "idle": sum(idle) / len(idle) if idle else 0.0,
            "peak_bytes": list(self.peak_bytes),
        }


def _rows(steps: Mapping[str, Step], none: Step, arrival: Step) -> tuple[TimedRow, ...]:
    """The rows of ``steps``, beside the same step that recomputes nothing, and all at arrival."""
    rows = []
    for name, step in steps.items():
        bound = none.seconds + bound_of(step).overhead_seconds
        others = none.seconds, bound, arrival.seconds if step.recomputed else None
        rows.append(TimedRow(name, step.seconds, step.timeline.peak_bytes, *others, step.timeline))
    return tuple(rows)


@dataclass(frozen=True)
class Report(Drawn):
    """Ways to recompute on one schedule, in the order in which they were asked for."""

    schedule: Schedule
    rows: tuple[TimedRow, ...]

    def table(self, units: Units | None = None) -> str:
        """The table for people; by default memory counts in A."""
        return table_of(self.rows, units or Units(), "recompute")

    def draw(
        self, path: str | PathLike[str] | None = None, *, budget_bytes: float | None = None, subtitle: str = ""
    ) -> str:
        """The picture as SVG text: the rows one over the other, with lines at the step without recomputation and at the
        bound. Memory counts in what one micro-batch saves on one stage.

        Args:
            path: the file to which it is written. Default: none.
            budget_bytes: where to draw a line across the memory.
            subtitle: what the picture is of.
        """
        picture = svg(
            *(row.timeline for row in self.rows),
            names=[in_words(row.name) for row in self.rows],
            budget_bytes=budget_bytes,
            units=_DRAWN,
            title=self._finding,
            subtitle=subtitle,
            lines=[row.moments for row in self.rows],
        )
        return self._written(path, picture)

    @property
    def _finding(self) -> str:
        """A sentence that sets the last row beside recompute at arrival, or beside the first row."""
        last = self.rows[-1]
        match = _POLICY.fullmatch(last.name)
        doing = _WORDS[match[1] and match[1].partition(":")[0]][1] if match else "Recomputing as given"
        other = next((row for row in self.rows[:-1] if row.name == "arrival"), self.rows[0])
        change = overhead(last.step_seconds, last.none_seconds if last is other else other.step_seconds)
        return f"{doing} makes the step {percent(abs(change))} {'longer' if change > 0 else 'shorter'}"

    def as_json(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule.name,
            "ranks": len(self.schedule.ranks),
            "stages": self.schedule.stages,
            "micro_batches": self.schedule.micro_batches,
            "rows": [row.as_json() for row in self.rows],
        }


@called("report()")
def report(
    schedule: Schedule,
    stages: Stages = Block(),  # noqa: B008  # frozen
    link: Links = 0.0,
    names: Sequence[str] = ("none", "arrival", "ahead"),
) -> Report:
    """Simulate ``schedule`` under each of the policies ``names``.

    >>> print(report(one_f_one_b(4, 4), names=("none", "arrival", "ahead/last_stage")).table())
    recompute         step  overhead   bound  hidden  peak
    none                21     0.0 %   0.0 %       -   4 A
    arrival             28    33.3 %  19.0 %    0.00   1 A
    ahead/last_stage    23     9.5 %   4.8 %    0.71   1 A

    Args:
        schedule: if it has recomputes already, they are the first row; the other rows start from it without them.
        stages, link: as in :func:`~torchckpt.planning.step.simulated.simulate`.
        names: see :func:`step_named`.

    Raises:
        ArgumentError: as the functions that are called.
    """
    check_schedule(schedule)
    check([fault for name in names for fault in policy_faults(name)])
    step = step_of(schedule, stages, link)
    steps = {AS_GIVEN: step} if recomputed_early(schedule) else {}
    plain = replace(step, schedule=without(schedule), choices={})
    steps |= {name: step_named(plain, name) for name in names}
    return Report(plain.schedule, _rows(steps, plain, step_named(plain, "arrival")))


def step_named(plain: Step, name: str) -> Step:
    """``plain`` with recomputes: ``none``, ``arrival``, ``ahead``; ``ahead:2`` for two micro-batches ahead;
    ``ahead/last_stage`` to keep what the last stage saves, likewise ``/last_micro_batch`` and ``/first_backward``.
    Recomputes ahead stand where the step is shortest."""
    match = _POLICY.fullmatch(name)
    when, k, kept = match.groups() if match else (None, None, None)
    policy = none if when is None else arrival if when == "arrival" else ahead
    choices = exempt(plain.schedule, policy(plain.schedule), *([kept] if kept else []))
    step = replace(plain, choices=choices)
    if policy is not ahead:
        return step
    early: Choices = {visit: step.choice(visit) for visit in choices}
    placed = replace(step, schedule=with_recompute(plain.schedule, early, int(k or 1)))
    return replace(placed, schedule=quickest_of(placed, int(k or 1)))


def policy_faults(name: str) -> list[Fault]:
    match = _POLICY.fullmatch(name)
    if match is None:
        close = get_close_matches(name, POLICIES, n=1, cutoff=0.0)[0]
        exempt_too = ", ".join(f"/{exemption}" for exemption in EXEMPTIONS)
        rule = f"the policy is not none, arrival, ahead or ahead:K; the last three also with {exempt_too}"
        return [Fault(rule, repr(name), repr(close))]
    return whole("k", int(match[2])) if match[2] else []


def in_words(name: str) -> str:
    """The name of a policy in words.

    >>> in_words("arrival"), in_words("ahead/last_stage")
    ('recomputed when the gradient arrives', 'recomputed ahead, last stage kept')
    """
    match = _POLICY.fullmatch(name)
    if match is None:
        return name
    when, k, exempt = match.groups()
    several = f", up to {k} micro-batches" if int(k or 1) > 1 else ""
    if not (several or exempt):
        return _WORDS[when][0]
    kept = f", {exempt.replace('_', ' ')} kept" if exempt else ""
    return f"recomputed {'at arrival' if when == 'arrival' else 'ahead'}{several}{kept}"


@dataclass(frozen=True)
class Comparison(Drawn):
    """A measured step, and the same step on paper, with the costs that it had."""

    rows: tuple[TimedRow, ...]
    """Nothing recomputed, everything at arrival, and this schedule, all three simulated; then the measured step."""
    step: Step
    """What was simulated, with the costs that were measured."""

    @property
    def measured(self) -> Timeline:
        return self.rows[3].timeline

    @property
    def simulated(self) -> Timeline:
        """The step on paper, of the same schedule."""
        return self.rows[2].timeline

    @property
    def none(self) -> Timeline:
        """The step on paper without recomputation."""
        return self.rows[0].timeline

    @property
    def arrival(self) -> Timeline:
        """The step on paper in which everything is recomputed when its gradient is there."""
        return self.rows[1].timeline

    @property
    def deviation(self) -> float:
        """The share by which the measured step is longer than the simulated one."""
        return overhead(self.measured.step_seconds, self.simulated.step_seconds)

    def table(self) -> str:
        """The tables for people: the steps, then the stages.

        Everything is measured against the simulated step without recomputation, so what the machine adds to the
        measured one counts as overhead, and what is not recomputed at all as hidden.
        """
        units = Units(time="ms", seconds=1e-3, memory="MB", bytes=1e6)
        stages: list[tuple[str, ...]] = [("stage", "forward", "backward", "recompute", "peak of rank")]
        peaks = self.measured.peak_bytes
        for stage, work in enumerate(self.step.stages):
            backward = work.input_grad_seconds + work.weight_grad_seconds
            times = work.forward_seconds, backward, work.recompute_seconds
            peak = units.of_memory(peaks[self.measured.schedule.placement[stage]])
            stages.append((str(stage), *map(units.of_time, times), peak))
        return f"{table_of(self.rows, units)}\n\n{aligned(stages)}"

    def _svg(self) -> str:
        """The measured step over the simulated one, with lines at the step without recomputation and at the bound, both
        on paper."""
        by = f"{abs(self.deviation) * 100:.1f} % {'longer' if self.deviation > 0 else 'shorter'} than"
        most = max((*self.measured.peak_bytes, *self.simulated.peak_bytes), default=0.0)
        units = units_of_clock(most)
        step = replace(units, digits=3).of_time(self.measured.step_seconds)
        return svg(
            self.measured,
            self.simulated,
            names=("measured", "on paper, with the costs that were measured"),
            title=f"The step takes {step}, {by if self.deviation else 'as'} on paper",
            lines=[self.rows[3].moments] * 2,
            units=units,
        )

    def __str__(self) -> str:
        return self.table()


def compare(measured: Timeline, step: Step) -> Comparison:
    """``measured`` beside ``step``, the same on paper, with costs that were measured too."""
    none = replace(step, schedule=without(step.schedule), choices={})
    arrival = step_named(none, "arrival")
    steps = {"none (simulated)": none, "at arrival (simulated)": arrival, "this schedule (simulated)": step}
    *others, simulated = _rows(steps, none, arrival)
    row = replace(
        simulated,
        name="this schedule (measured)",
        step_seconds=measured.step_seconds,
        peak_bytes=measured.peak_bytes,
        timeline=measured,
    )
    return Comparison((*others, replace(simulated, timeline=step.explained()), row), step)
