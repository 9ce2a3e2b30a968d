"""Gantt: the chart as text, ``stage 1 | . F0 F1 R1 B1``, one row per stage, or per rank that holds several."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from torchckpt.planning.draw.units import label, row_name
from torchckpt.planning.figures import Event, TimelineFigures

__all__ = ["gantt"]

_FINEST = 1000  # times are tried as multiples of 1/1000, and of 1/2 ... 1/999
_TOLERANCE = 1e-6


class _Grid(NamedTuple):
    columns_per_second: float
    cell: int = 1  # columns between two dots of idle time
    numbered: bool = True

    def column(self, seconds: float) -> int:
        return round(seconds * self.columns_per_second)


def gantt(timeline: TimelineFigures, width: int = 160) -> str:
    """Who does what when; time runs to the right, ``.`` is idle, ``-`` goes on with what stands before it.

    In full where ``width`` columns suffice; else without the numbers of the micro-batches; else letters get as many
    columns as their time is worth.

    >>> schedule = one_f_one_b(2, 2)
    >>> print(gantt(simulate(schedule, choices=exempt(schedule, ahead(schedule), "last_stage"))))
    stage 0 | F0 F1 R0 .  B0--- R1 B1---
    stage 1 | .  F0 B0--- F1 B1--- .  .

    Args:
        timeline: what to draw.
        width: the longest line, in characters.
    """
    names = [row_name(timeline.schedule, rank) for rank in range(len(timeline.schedule.ranks))]
    margin = max(map(len, names), default=0)
    room = max(width - margin - len(" | "), 1)
    rows = _rows(timeline, room)
    return "\n".join(f"{name:<{margin}} | {row}".rstrip() for name, row in zip(names, rows))


def _rows(timeline: TimelineFigures, room: int) -> list[str]:
    per_rank: list[list[Event]] = [[] for _ in timeline.schedule.ranks]
    for event in timeline.events:
        if event.end_seconds > event.start_seconds:
            per_rank[event.rank].append(event)
    durations = sorted(event.end_seconds - event.start_seconds for events in per_rank for event in events)
    if not durations:
        return ["" for _ in per_rank]
    proportional = _Grid(room / timeline.step_seconds)
    if durations[len(durations) // 2] * proportional.columns_per_second < 1:
        return [_crowded(events, proportional, room) for events in per_rank]
    grid = _exact(timeline, durations[0], room) or proportional
    return [_spelled(timeline, events, grid) for events in per_rank]


def _exact(timeline: TimelineFigures, shortest: float, room: int) -> _Grid | None:
    """The narrowest grid in which every event begins on a column, and its label fits; None if that is too wide."""
    if timeline.step_seconds > shortest * room:
        return None
    times = {time for event in timeline.events for time in (event.start_seconds, event.end_seconds)}
    unit = _unit([time / shortest for time in times]) * shortest
    if not unit:
        return None
    longest = max(len(label(timeline.schedule, event.action)) for event in timeline.events)
    for needed in (longest + 1, 1):
        cell = math.ceil(needed / round(shortest / unit))
        if timeline.step_seconds / unit * cell <= room:
            return _Grid(cell / unit, cell, needed > 1)
    return None


def _unit(times: Sequence[float]) -> float:
    """The greatest common divisor of all ``times``; 0 if they are not multiples of a common simple fraction."""
    fractions = [Fraction(time).limit_denominator(_FINEST) for time in times]
    if any(abs(float(fraction) - time) > _TOLERANCE * max(1.0, abs(time)) for fraction, time in zip(fractions, times)):
        return 0.0
    parts = math.lcm(*(fraction.denominator for fraction in fractions))
    return math.gcd(*(int(fraction * parts) for fraction in fractions)) / parts


def _spelled(timeline: TimelineFigures, events: list[Event], grid: _Grid) -> str:
    """Each event by its label, dashes up to its end, and a blank where there is room for one."""
    row = ["." if column % grid.cell == 0 else " " for column in range(grid.column(timeline.step_seconds))]
    for event in events:
        start, end = grid.column(event.start_seconds), grid.column(event.end_seconds)
        name = label(timeline.schedule, event.action)
        if not grid.numbered or len(name) > end - start:
            name = event.action.kind.value
        gap = " " if end - start > len(name) and (grid.numbered or grid.cell > 1) else ""
        row[start:end] = (name.ljust(end - start - len(gap), "-") + gap)[: end - start]
    return "".join(row)


def _crowded(events: list[Event], grid: _Grid, room: int) -> str:
    """Each column is one of the things done in it, so that all together get as many columns as their time is worth."""
    shares: list[dict[str, float]] = [{} for _ in range(room)]
    for event in events:
        start, end = (seconds * grid.columns_per_second for seconds in (event.start_seconds, event.end_seconds))
        letter = event.action.kind.value
        for column in range(int(start), min(math.ceil(end), room)):
            share = min(end, column + 1) - max(start, column)
            shares[column][letter] = shares[column].get(letter, 0.0) + share
    return "".join(_shared_out(shares))


def _shared_out(shares: list[dict[str, float]]) -> Iterator[str]:
    due: dict[str, float] = {}
    for column in shares:
        column["."] = max(0.0, 1.0 - sum(column.values()))
        for letter, share in column.items():
            due[letter] = due.get(letter, 0.0) + share
        chosen = max((letter for letter in column if column[letter] > _TOLERANCE), key=lambda letter: due[letter])
        due[chosen] -= 1.0
        yield chosen
