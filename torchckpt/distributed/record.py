"""Record: the times of each action in the last steps of this rank, and the records of all ranks combined."""
from __future__ import annotations

import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, replace
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from torchckpt.distributed.objects import all_gather
from torchckpt.distributed.sizes import Size
from torchckpt.kernel.clock import Clock, Stamp
from torchckpt.model import Action, Block, Choice, Schedule, Stage, Step
from torchckpt.model.schedule.orders import Visit
from torchckpt.model.step.measured import Seconds, Span, Spans, measured_links, measured_seconds, replays_apart
from torchckpt.model.step.placement import recomputed_early

__all__ = ["Gathered", "Record", "gather"]

KEPT_STEPS = 8
"""How many steps are kept, for medians."""

_Replay: TypeAlias = "tuple[Visit, Stamp, Stamp]"
_Noted: TypeAlias = "tuple[Action, Stamp, Stamp, Stamp]"


class Record:
    """The times of the actions of one rank. What is replayed inside a backward is listed as a recompute of its own, at
    the start of the backward."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._clock = Clock(device)
        self._steps: deque[list[_Noted]] = deque(maxlen=KEPT_STEPS)
        self._current: list[_Noted] = []
        self._replays: deque[list[_Replay]] = deque(maxlen=KEPT_STEPS)
        self._current_replays: list[_Replay] = []
        self._due: Stamp = None
        self._is_recomputing = False

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
    def recomputing(self, action: Action) -> Iterator[None]:
        """A context around an action that recomputes."""
        start, self._is_recomputing = self._clock.stamp(), True
        try:
            yield
        finally:
            self._is_recomputing = False
        self.ended(action, start)

    @contextmanager
    def replaying(self, visit: Visit) -> Iterator[None]:
        """A context around the replay of one region of a stage and micro-batch."""
        if self._is_recomputing:
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

    step: Step
    """What was run, with the medians that were measured; each region is a block of its stage, all alike."""
    spans: list[Spans]
    """The spans of each kept step. If the pipeline has replicas, the steps of the first come first."""


def gather(
    schedule: Schedule,
    kept: Collection[Visit],
    rank: int,
    record: Record,
    sizes: Mapping[int, Size],
    group: dist.ProcessGroup | None,
) -> Gathered:
    """Combine the records of all ranks. Collective: all ranks must call it.

    Processes on one machine share a clock. Clocks of different machines are compared after a barrier, with an error of
    about the time of one message.

    Args:
        kept: the visits of which nothing is recomputed.
        sizes: those of the stages of this ``rank`` of the pipeline.
    """
    with record.device_current():  # NCCL's collectives are on the current device
        dist.barrier(group)
        mine = socket.gethostname(), time.perf_counter(), rank, record.spans(), sizes
        said = all_gather(mine, group)
    replicas: list[list[list[list[Span]]]] = [[] for _ in schedule.ranks]
    every: dict[int, Size] = {}
    for host, now, place, steps, own in said:
        ahead = 0.0 if host == said[0][0] else now - said[0][1]
        replicas[place].append([[_shifted(span, ahead) for span in step] for step in steps])
        every.update(own)
    spans: list[Spans] = [list(ranks) for replica in zip(*replicas) for ranks in zip(*replica)]
    return Gathered(_step(schedule, kept, [every.get(stage, Size()) for stage in range(schedule.stages)], spans), spans)


def _step(schedule: Schedule, kept: Collection[Visit], sizes: Sequence[Size], spans: Sequence[Spans]) -> Step:
    early = recomputed_early(schedule)
    each = [_choices_of(size) for size in sizes]
    choices = {
        (stage, i): each[stage][(stage, i) not in early]
        for stage in range(schedule.stages)
        for i in range(schedule.micro_batches)
        if (stage, i) not in kept
    }
    unknown = Step(schedule, (Stage((Block(),)),) * schedule.stages, (), choices)
    measured = spans[1:] or spans
    stages = tuple(map(_stage, sizes, measured_seconds(unknown, measured)))
    return replace(unknown, stages=stages, links=measured_links(unknown, measured))


def _choices_of(size: Size) -> tuple[Choice, Choice]:
    """Of a visit with an ``R``, which replays the last regions; and of one without, whose backward replays all."""
    regions = tuple(range(max(1, size.regions)))
    first = len(regions) - max(1, min(size.early, len(regions)))
    return Choice((), regions[first:], regions[:first]), Choice((), (), regions)


def _stage(size: Size, seconds: Seconds) -> Stage:
    regions = max(1, size.regions)
    boundary = size.boundary_bytes or 0.0
    amounts = (*astuple(seconds), max(size.saved_bytes or 0.0, boundary), boundary)
    return Stage((Block(*(amount / regions for amount in amounts)),) * regions, message_bytes=boundary)


def _shifted(span: Span, seconds: float) -> Span:
    action, *times = span.action, span.due_seconds, span.start_seconds, span.end_seconds
    return Span(action, *(time - seconds for time in times))
