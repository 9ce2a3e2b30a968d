"""Figures: one step as data, simulated or measured, and what follows from it; and how every result is drawn."""
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path

from torchckpt.errors import Fault, raise_fault
from torchckpt.planning.order.schedule import Action, Schedule

__all__ = ["Copy", "Drawn", "Event", "Message", "Row", "TimelineFigures", "overhead"]


def overhead(seconds: float, none_seconds: float) -> float:
    """The share by which a step is longer than one that recomputes nothing; 0 if that one takes no time."""
    return (seconds - none_seconds) / none_seconds if none_seconds else 0.0


class Drawn:
    """A result that has a picture. ``draw()`` returns it, and a notebook shows it."""

    def draw(self, path: str | PathLike[str] | None = None) -> str:
        """The picture as SVG text. It is written to ``path``, if one is given.

        Raises:
            ArgumentError: the name of the file is that of another kind of picture.
        """
        return self._written(path, self._svg())

    def _svg(self) -> str:
        raise NotImplementedError

    def _written(self, path: str | PathLike[str] | None, text: str) -> str:
        if path is not None:
            file = Path(path)
            if file.suffix.lower() not in ("", ".svg"):
                rule = "the picture is SVG, and the file's name does not end in .svg"
                raise_fault(Fault(rule, str(file), f'draw("{file.with_suffix(".svg").name}")'), "draw()")
            file.write_text(text, encoding="utf-8")
        return text

    def _repr_svg_(self) -> str:
        return self.draw()


@dataclass(frozen=True, slots=True)
class Event:
    """An action on a rank, from ``start_seconds`` to ``end_seconds``."""

    rank: int
    action: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class Message:
    """A message of ``action`` to ``to_stage``: an activation after a forward, a gradient after a backward."""

    action: Action
    to_stage: int
    sent_seconds: float
    arrived_seconds: float


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of one block of one visit from ``rank`` to its host, or back."""

    rank: int
    stage: int
    micro_batch: int
    block: int
    is_back: bool
    start_seconds: float
    end_seconds: float
    bytes: float


@dataclass(frozen=True)
class TimelineFigures:
    """When everything of one step happened."""

    schedule: Schedule
    events: tuple[Event, ...]
    messages: tuple[Message, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...]
    """The curve of bytes alive on each rank, as (time, bytes) at each change."""
    exposed_seconds: tuple[float, ...] = ()
    """The seconds by which the recomputation of each stage lengthens the step."""
    critical_path: tuple[Event | Message, ...] = ()
    copies: tuple[Copy, ...] = ()
    """Those between ranks and their hosts, rank by rank in the order in which they were queued."""
    host_memory: tuple[tuple[tuple[float, float], ...], ...] = ()
    """The curve of bytes of each rank that are on its host: from the start of a copy out to the end of the copy back.
    Empty without copies."""
    waited_seconds: tuple[float, ...] = ()
    """The seconds that the compute of each rank waited for copies. They are part of its events."""

    @cached_property
    def step_seconds(self) -> float:
        return max((event.end_seconds for event in self.events), default=0.0)

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most bytes of each rank."""
        return tuple(max((amount for _, amount in curve), default=0.0) for curve in self.memory)

    @property
    def idle_share(self) -> tuple[float, ...]:
        """The share of the step in which each rank computes nothing."""
        step = self.step_seconds
        busy = [0.0] * len(self.schedule.ranks)
        for event in self.events:
            busy[event.rank] += event.end_seconds - event.start_seconds
        for rank, waited in enumerate(self.waited_seconds):
            busy[rank] -= waited
        return tuple(1 - seconds / step if step else 0.0 for seconds in busy)


@dataclass(frozen=True)
class Row:
    """A named step beside the one that recomputes nothing. Shares are of the latter."""

    name: str
    step_seconds: float
    peak_bytes: tuple[float, ...]
    """The peak of each rank; empty if it is not known."""
    none_seconds: float
    """The step in which nothing is recomputed."""
    bound_seconds: float
    """No step is shorter that recomputes as much; of a plan, none that fits its budget."""
    arrival_seconds: float | None
    """The step in which everything is recomputed when its gradient arrives; None if this one recomputes nothing."""

    @property
    def overhead(self) -> float:
        return overhead(self.step_seconds, self.none_seconds)

    @property
    def bound(self) -> float:
        """The least overhead that is possible."""
        return overhead(self.bound_seconds, self.none_seconds)

    @property
    def hidden(self) -> float | None:
        """The share of what recompute at arrival adds that this step does not; None if there is nothing to hide."""
        none, arrival = self.none_seconds, self.arrival_seconds
        if arrival is None or not none < arrival < math.inf:
            return None
        return 1 - (self.step_seconds - none) / (arrival - none)
