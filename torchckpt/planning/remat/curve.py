"""Curve: the memory of a schedule over time, at the resolution of a picture, and the times of its repeats."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, groupby, pairwise, takewhile
from operator import itemgetter
from typing import NamedTuple, TypeVar

from torchckpt.planning.remat.flow.dataflow import Dataflow, Schedule, first_runs
from torchckpt.planning.remat.flow.dataflow import runs as operations_of
from torchckpt.planning.remat.flow.memory import simulate

__all__ = [
    "Label", "Run", "Span", "beside", "grouped", "joined", "kinds", "runs", "spans", "spread", "thinned",
]

_Item = TypeVar("_Item")


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
    """A part of a picture with a name: from when to when, and for how many of these seconds."""

    name: str
    start_seconds: float
    end_seconds: float
    seconds: float


def runs(flow: Dataflow, schedule: Schedule) -> list[Run]:
    """The steps of ``schedule``. Where no operation takes time, each run takes one second.

    Raises:
        ArgumentError: as :func:`~torchckpt.planning.remat.flow.memory.simulate`.
    """
    memory, firsts, timed = simulate(flow, schedule), first_runs(schedule), flow.seconds > 0
    seconds = [operation.seconds if timed else 1.0 for operation in operations_of(flow, schedule)]
    starts = accumulate(seconds, initial=0.0)
    return [
        Run(index, start, end, alive, step < memory.boundary, firsts[index] != step)
        for step, (index, (start, end), alive) in enumerate(zip(schedule, pairwise(starts), memory.bytes_during))
    ]


def grouped(items: Iterable[_Item], belongs: Callable[[list[_Item], _Item], bool]) -> list[list[_Item]]:
    """Neighbours in groups: an item that does not belong to the group before it begins a new one."""
    groups: list[list[_Item]] = []
    for item in items:
        if groups and belongs(groups[-1], item):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def thinned(every: Iterable[Run], finest_seconds: float) -> list[list[Run]]:
    """Neighbours in groups: shorter ones together until they last ``finest_seconds``, longer ones alone.

    A group is in the forward or in the backward. Drawn as high as its highest run, it shows every peak.
    """
    def is_short(group: list[Run], run: Run) -> bool:
        seconds = max(group[-1].end_seconds - group[0].start_seconds, run.seconds)
        return seconds < finest_seconds and group[0].in_forward == run.in_forward

    return grouped(every, is_short)


def kinds(every: Iterable[Run], finest_seconds: float) -> list[Span]:
    """The kinds that run, and when. Where they alternate faster than ``finest_seconds``, repeats come first."""
    alike = (list(group) for _, group in groupby(every, lambda run: (run.kind, run.in_forward)))
    phases = [group[0]._replace(end_seconds=group[-1].end_seconds) for group in alike]
    listed: list[Span] = []
    for group in thinned(phases, finest_seconds):
        now = group[0].start_seconds
        for kind, members in groupby(sorted(group, key=lambda run: not run.is_repeat), lambda run: run.kind):
            seconds = sum(run.seconds for run in members)
            listed.append(Span(kind, now, now + seconds, seconds))
            now += seconds
    return listed


def spans(every: Iterable[Run], paths: Sequence[str], depth: int) -> list[Span]:
    """What is repeated when, named by the first ``depth`` parts of a path; ``paths`` has that of each operation.

    Repeats of one name with no repeat of another in between are one span.
    """
    repeats = ((".".join(paths[run.operation].split(".")[:depth]), run) for run in every if run.is_repeat)
    named = ((name, [run for _, run in members]) for name, members in groupby(repeats, itemgetter(0)))
    return [
        Span(name, members[0].start_seconds, members[-1].end_seconds, sum(run.seconds for run in members))
        for name, members in named
    ]


def joined(parts: Iterable[Span]) -> list[Span]:
    """Neighbours with nothing in between as one, named after the first and the last: ``layers.3 - 5``."""
    together = grouped(parts, lambda group, span: group[-1].end_seconds == span.start_seconds)
    return [_joined(group) for group in together]


def _joined(together: Sequence[Span]) -> Span:
    name, last = together[0].name, together[-1].name
    if name != last:
        parts = zip(name.split("."), last.split("."))
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], parts)))
        name = " - ".join(filter(None, (name, ".".join(last.split(".")[shared:]))))
    return Span(name, together[0].start_seconds, together[-1].end_seconds, sum(span.seconds for span in together))


class Label(NamedTuple):
    """A name that wants to stand around ``place`` and is ``extent`` long; of two that touch, the heavier stays."""

    name: str
    place: float
    extent: float
    weight: float


def beside(wanted: Sequence[Label], start: float, end: float) -> list[Label]:
    """The labels that have room beside one another between ``start`` and ``end``, the heaviest first."""
    placed: list[Label] = []
    for label in sorted(wanted, key=lambda label: -label.weight):
        half = label.extent / 2
        moved = label._replace(place=max(start + half, min(label.place, end - half)))
        if all(abs(moved.place - other.place) >= half + other.extent / 2 for other in placed):
            placed.append(moved)
    return placed


def spread(places: Sequence[float], pitch: float, end: float) -> list[float]:
    """Move ``places``, which ascend, as little as keeps each ``pitch`` from the next, and none beyond ``end``.

    >>> spread([10, 50, 52, 90], pitch=14, end=100)
    [10.0, 44.0, 58.0, 90.0]
    """
    groups: list[list[float]] = []
    for place in places:
        groups.append([place])
        while len(groups) > 1 and _lines(groups[-2], pitch, end)[-1] + pitch > _lines(groups[-1], pitch, end)[0]:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [line for group in groups for line in _lines(group, pitch, end)]


def _lines(group: Sequence[float], pitch: float, end: float) -> list[float]:
    height = pitch * (len(group) - 1)
    first = min(sum(group) / len(group) - height / 2, end - height)
    return [first + pitch * index for index in range(len(group))]
