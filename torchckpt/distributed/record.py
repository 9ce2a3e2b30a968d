"""Record: the times of each action in the last steps of this rank, and the records of all ranks combined."""
from __future__ import annotations

import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from torchckpt.distributed.sizes import Size
from torchckpt.kernel.clock import Clock, Stamp
from torchckpt.model import Action, Link, Schedule, Segments, StageCosts
from torchckpt.model.schedule.orders import Visit
from torchckpt.model.simulation.measured import Span, measured_costs, replays_apart

__all__ = ["Gathered", "Record", "gather"]

KEPT_STEPS = 8
"""How many steps are kept, for medians."""

_Replay: TypeAlias = "tuple[Visit, Stamp, Stamp]"
_Noted: TypeAlias = "tuple[Action, Stamp, Stamp, Stamp]"


class Record:
    """The times of the actions of one rank.

    Args:
        apart: list the replays inside a backward as a separate recompute, at the start of the backward.
    """

    def __init__(self, device: torch.device, apart: bool = False) -> None:
        self._apart, self.device = apart, device
        self._clock = Clock(device)
        self._steps: deque[list[_Noted]] = deque(maxlen=KEPT_STEPS)
        self._current: list[_Noted] = []
        self._replays: deque[list[_Replay]] = deque(maxlen=KEPT_STEPS)
        self._current_replays: list[_Replay] = []
        self._due: Stamp = None

    def device_current(self) -> AbstractContextManager[Any]:
        """Inside the block, the device of this rank is the current device."""
        if self.device.type == "cpu":
            return nullcontext()
        context: AbstractContextManager[Any] = torch.get_device_module(self.device).device(self.device)
        return context

    def reader(self) -> Callable[[Stamp], float]:
        """A function that turns stamps of :meth:`now` into seconds."""
        return self._clock.reader()

    def begin(self) -> None:
        self._current, self._current_replays = [], []

    def due(self) -> None:
        """Note that the next action is due: from now on the rank waits for it to start."""
        self._due = self._clock.stamp()

    def now(self) -> Stamp:
        return self._clock.stamp()

    def ended(self, action: Action, start: Stamp) -> None:
        end = self._clock.stamp()
        self._current.append((action, self._due, start, end))
        self._due = end  # for the second half of a pair that torch runs as one action

    @contextmanager
    def replaying(self, visit: Visit) -> Iterator[None]:
        """A context around the replay of one region of a stage and micro-batch."""
        if not self._apart:
            yield
            return
        start = self._clock.stamp()
        yield
        self._current_replays.append((visit, start, self._clock.stamp()))

    def end(self) -> None:
        self._steps.append(self._current)
        self._replays.append(self._current_replays)

    def clear(self) -> None:
        self._steps.clear()
        self._replays.clear()

    @property
    def steps(self) -> int:
        """How many steps are kept now."""
        return len(self._steps)

    def spans(self) -> list[list[Span]]:
        """The spans of the kept steps, the latest step last."""
        seconds = self._clock.reader()
        found = []
        for step, replays in zip(self._steps, self._replays):
            spans = [Span(action, seconds(due), seconds(start), seconds(end)) for action, due, start, end in step]
            inside: defaultdict[Visit, float] = defaultdict(float)
            for visit, start, end in replays:
                inside[visit] += seconds(end) - seconds(start)
            found.append(replays_apart(spans, inside))
        return found


class Gathered(NamedTuple):
    """The measurements of all ranks of a group; equal on every rank."""

    schedule: Schedule
    """The schedule, with the segments that were measured."""
    steps: list[list[list[Span]]]
    """The spans of each kept step and each rank. If the pipeline has replicas, the steps of the first come first."""
    costs: tuple[StageCosts, ...]
    links: tuple[Link, ...]
    segments: tuple[Segments, ...]
    """For each stage: the number of regions, and how many of them the recompute action replays."""


def gather(
    schedule: Schedule, rank: int, record: Record, found: dict[int, Size], group: dist.ProcessGroup | None
) -> Gathered:
    """Combine the records of all ranks. Collective: all ranks must call it. ``found`` has the sizes of the stages of
    this ``rank`` of the pipeline.

    Processes on one machine share a clock. Clocks of different machines are compared after a barrier, with an error of
    about the time of one message.
    """
    with record.device_current():  # NCCL's collectives are on the current device
        dist.barrier(group)
        mine = socket.gethostname(), time.perf_counter(), rank, record.spans(), found
        said: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(said, mine, group=group)
    replicas: list[list[list[list[Span]]]] = [[] for _ in schedule.ranks]
    sizes: dict[int, Size] = {}
    for host, now, place, steps, own in said:
        ahead = 0.0 if host == said[0][0] else now - said[0][1]
        replicas[place].append([[_shifted(span, ahead) for span in step] for step in steps])
        sizes.update(own)
    steps = [list(ranks) for replica in zip(*replicas) for ranks in zip(*replica)]
    listed = [sizes.get(stage, Size()) for stage in range(schedule.stages)]
    parts = tuple(Segments(max(1, size.early), max(1, size.regions)) for size in listed)
    if not schedule.late and any(part.early < part.total for part in parts):
        schedule = replace(schedule, segments=parts)
    kept = [(size.saved_bytes or 0.0, size.boundary_bytes or 0.0) for size in listed]
    bytes_alone = [StageCosts(saved_bytes=saved, boundary_bytes=boundary) for saved, boundary in kept]
    costs, links = measured_costs(schedule, steps[1:] or steps, bytes_alone)
    return Gathered(schedule, steps, costs, links, parts)


def _shifted(span: Span, seconds: float) -> Span:
    action, *times = span.action, span.due_seconds, span.start_seconds, span.end_seconds
    return Span(action, *(time - seconds for time in times))
