"""Report: what ways of recomputing cost on one schedule, side by side, beside the bound."""
from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from os import PathLike
from typing import Any

from torchckpt.errors import Fault, called, check
from torchckpt.planning.draw.svg import svg
from torchckpt.planning.draw.units import Units, aligned, percent
from torchckpt.planning.figures import Drawn
from torchckpt.planning.order.orders import whole
from torchckpt.planning.order.schedule import Schedule
from torchckpt.planning.order.validity import check_schedule
from torchckpt.planning.step.bound import bound_of
from torchckpt.planning.step.placement import recomputed_early, with_recompute, without
from torchckpt.planning.step.quickest import quickest_of
from torchckpt.planning.step.simulated import Step, step_of
from torchckpt.planning.step.timeline import Timeline
from torchckpt.planning.work.block import Block
from torchckpt.planning.work.choice import EXEMPTIONS, Choices, ahead, arrival, exempt, none
from torchckpt.planning.work.inputs import Links, Stages

__all__ = ["AS_GIVEN", "POLICIES", "Report", "Row", "in_words", "policy_faults", "report", "step_named"]

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
_HEADS = ("recompute", "step", "overhead", "bound", "hidden", "peak")


@dataclass(frozen=True)
class Row:
    """One way of recomputing. Shares are of the step in which nothing is recomputed."""

    name: str
    timeline: Timeline
    overhead: float
    bound: float
    """The least overhead that is possible for what this row recomputes."""
    hidden: float | None
    """The share of what recompute at arrival exposes that this row does not; None where neither recomputes."""

    @property
    def bound_seconds(self) -> float:
        """The step, if it had the least overhead."""
        return self.none_seconds * (1 + self.bound)

    @property
    def none_seconds(self) -> float:
        """The step in which nothing is recomputed."""
        return self.timeline.step_seconds / (1 + self.overhead)

    @property
    def idle_share(self) -> float:
        """The share of the step in which a rank computes nothing, the mean of all ranks."""
        shares = self.timeline.idle_share
        return sum(shares) / len(shares) if shares else 0.0

    def cells(self, units: Units) -> tuple[str, ...]:
        return (
            self.name,
            units.of_time(self.timeline.step_seconds),
            percent(self.overhead),
            percent(self.bound),
            "-" if self.hidden is None else f"{self.hidden:.2f}",
            units.of_memory(max(self.timeline.peak_bytes)),
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "recompute": self.name,
            "step_seconds": self.timeline.step_seconds,
            "overhead": self.overhead,
            "bound": self.bound,
            "hidden": self.hidden,
            "idle": self.idle_share,
            "peak_bytes": list(self.timeline.peak_bytes),
        }


@dataclass(frozen=True)
class Report(Drawn):
    """The rows of a table, in the order in which they were asked for."""

    schedule: Schedule
    rows: tuple[Row, ...]

    def table(self, units: Units | None = None) -> str:
        """The table for people: names are on the left, numbers on the right of their columns."""
        return aligned([_HEADS, *(row.cells(units or Units()) for row in self.rows)])

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
        names = [in_words(row.name) for row in self.rows]
        lines = [{"no recomputation": row.none_seconds, "bound": row.bound_seconds} for row in self.rows]
        picture = svg(
            *(row.timeline for row in self.rows),
            names=names,
            budget_bytes=budget_bytes,
            units=_DRAWN,
            title=self._finding,
            subtitle=subtitle,
            lines=lines,
        )
        return self._written(path, picture)

    @property
    def _finding(self) -> str:
        """A sentence that sets the last row beside recompute at arrival, or beside the first row."""
        last = self.rows[-1]
        match = _POLICY.fullmatch(last.name)
        doing = _WORDS[match[1] and match[1].partition(":")[0]][1] if match else "Recomputing as given"
        other = next((row for row in self.rows[:-1] if row.name == "arrival"), self.rows[0])
        before = last.none_seconds if last is other else other.timeline.step_seconds
        change = last.timeline.step_seconds / before - 1 if before else 0.0
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
    given = step_of(schedule, stages, link)
    steps = {AS_GIVEN: given} if recomputed_early(schedule) else {}
    plain = replace(given, schedule=without(schedule), choices={})
    steps |= {name: step_named(plain, name) for name in names}
    least, most = plain.seconds, step_named(plain, "arrival").seconds
    return Report(plain.schedule, tuple(_row(name, step, least, most) for name, step in steps.items()))


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
    """The faults of the name of a policy."""
    match = _POLICY.fullmatch(name)
    if match is None:
        close = get_close_matches(name, POLICIES, n=1, cutoff=0.0)[0]
        exempt_too = ", ".join(f"/{one}" for one in EXEMPTIONS)
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


def _row(name: str, step: Step, least: float, most: float) -> Row:
    """The row of ``step``. ``least`` and ``most`` are the steps that recompute nothing, and all at arrival."""
    added, floor = step.seconds - least, bound_of(step).overhead_seconds
    hidden = 1 - added / (most - least) if step.recomputed and most > least else None
    return Row(name, step.timeline, added / least if least else 0.0, floor / least if least else 0.0, hidden)
