"""Curve: the memory of a schedule over time, at the resolution of a picture."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple, TypeVar

from torchckpt.planning.remat.flow.dataflow import Dataflow, Schedule, first_runs
from torchckpt.planning.remat.flow.dataflow import runs as operations_of
from torchckpt.planning.remat.flow.memory import simulate

__all__ = ["Run", "Span", "grouped", "kinds", "runs", "thinned"]

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
    """A time in which runs of one kind are drawn."""

    kind: str
    start_seconds: float
    end_seconds: float


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
            end = now + sum(run.seconds for run in members)
            listed.append(Span(kind, now, end))
            now = end
    return listed
