"""Record: the times of each action in the last steps of this rank, and the records of all ranks combined."""
from __future__ import annotations

import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.distributed.meeting import all_gather
from torchckpt.planning import Action, Block, Choice, Schedule, Stage, Step
from torchckpt.planning.order.orders import Visit
from torchckpt.planning.step.measured import Span, Spans, measured_links, measured_seconds, replays_apart
from torchckpt.planning.step.placement import recomputed_early
from torchckpt.regions.clock import Clock, Stamp
from torchckpt.regions.core.frame import Frame, SavedTensors
from torchckpt.regions.saved import bytes_of, saved_bytes

__all__ = ["Gathered", "Record", "Size", "Sizes", "gather"]

@dataclass
class Size:
    """The bytes that one micro-batch keeps on one stage. Parameters do not count."""

    saved_bytes: float | None = None
    """The bytes that are held if its forward keeps its activations, the inputs of regions included; None if not counted
    yet."""
    boundary_bytes: float | None = None
    """The bytes that its forward saves if it is recomputed; None if not counted yet."""
    regions: int = 0
    early: int = 0
    """How many of its regions the recompute action replays, before the backward."""


class Sizes:
    """Counts the size of each stage, once, into ``found``. Later calls cost nothing."""

    def __init__(self, segments: int | None) -> None:
        self._segments = segments
        self.found: dict[int, Size] = {}
        self._boundaries: dict[int, dict[int, Set[StorageWeakRef]]] = {}  # by stage and micro-batch, until counted
        self._to_count: dict[int, tuple[int, int]] = {}  # by stage: micro-batch, regions left to count

    @contextmanager
    def of_forward(self, stage: int, micro_batch: int, keep: bool, frames: Sequence[Frame]) -> Iterator[None]:
        """A context around a forward. At its end, ``frames`` must hold the frames of the forward's regions."""
        size = self.found.setdefault(stage, Size())
        if size.saved_bytes is not None and (keep or size.boundary_bytes is not None):
            yield
            return
        with saved_bytes() as saved:
            yield
        if keep:
            size.saved_bytes = saved.total if size.saved_bytes is None else size.saved_bytes
            return
        if size.boundary_bytes is None:
            size.boundary_bytes = saved.total
            size.regions = len(frames)
            size.early = size.regions if self._segments is None else min(self._segments, size.regions)
        if size.saved_bytes is None:  # until a replay of one of them is counted
            self._boundaries.setdefault(stage, {})[micro_batch] = saved.storages

    @contextmanager
    def of_replay(
        self, stage: int, micro_batch: int, recomputed: deque[SavedTensors], module: nn.Module
    ) -> Iterator[None]:
        """A context around the replay of one region, which fills ``recomputed``."""
        yield
        size = self.found.setdefault(stage, Size())
        if size.saved_bytes is None:
            size.saved_bytes, self._to_count[stage] = size.boundary_bytes or 0.0, (micro_batch, size.regions)
        counted, left = self._to_count.get(stage, (micro_batch, 0))
        if counted == micro_batch and left:
            fresh = [tensor for saved in recomputed for tensor, _ in saved]
            boundary = self._boundaries.get(stage, {}).get(micro_batch, set())
            size.saved_bytes += bytes_of(fresh, but=module.parameters(), but_storages=boundary)
            self._to_count[stage] = micro_batch, left - 1
        if not left:
            self._boundaries.pop(stage, None)


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


def _stage(size: Size, seconds: Block) -> Stage:
    regions = max(1, size.regions)
    boundary = size.boundary_bytes or 0.0
    whole = replace(seconds, saved_bytes=max(size.saved_bytes or 0.0, boundary), boundary_bytes=boundary)
    return Stage((Block(*(amount / regions for amount in astuple(whole))),) * regions, message_bytes=boundary)


def _shifted(span: Span, seconds: float) -> Span:
    action, *times = span.action, span.due_seconds, span.start_seconds, span.end_seconds
    return Span(action, *(time - seconds for time in times))
