"""Record: the times of each action in the last steps of one rank."""
from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import torch

from torchckpt.planning import Action, Stage
from torchckpt.planning.order.schedule import BACKWARDS, Visit
from torchckpt.planning.step.measured import Span, replays_apart
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.devices import Clock, Stamp

__all__ = ["KEPT_STEPS", "Record", "with_seconds"]

KEPT_STEPS = 8
"""How many steps are kept, for medians."""

_Noted: TypeAlias = "tuple[Action, Stamp, Stamp, Stamp]"


class _Replay(NamedTuple):
    visit: Visit
    region: int
    start: Stamp
    end: Stamp
    after_tail: Stamp
    """When it had run to the end of its forward; ``end``, if it did not."""
    is_early: bool
    """Whether an action recomputed, not a backward."""


class Record:
    """The times of the actions of one rank. What is replayed inside a backward is listed as a recompute of its own, at
    the start of the backward."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times_early_replays = False
        """Whether replays inside of actions that recompute are noted, for :meth:`replay_seconds`."""
        self._clock = Clock(device)
        self.steps: deque[tuple[list[_Noted], list[_Replay]]] = deque(maxlen=KEPT_STEPS)
        self._current: list[_Noted] = []
        self._current_replays: list[_Replay] = []
        self._due: Stamp = None
        self._is_recomputing = False

    def device_current(self) -> AbstractContextManager[Any]:
        """Inside the block, the device of this rank is the current device."""
        if self.device.type == "cpu":
            return nullcontext()
        context: AbstractContextManager[Any] = torch.get_device_module(self.device).device(self.device)
        return context

    def begin(self) -> None:
        self._current, self._current_replays = [], []

    def awaits(self) -> Stamp:
        """Note that the rank waits for its next action from now on. Returns the time."""
        self._due = self._clock.stamp()
        return self._due

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
    def replaying(self, visit: Visit, region: int, frame: Frame | None = None) -> Iterator[None]:
        """A context around the replay of one region of a stage and micro-batch. Where that of a ``frame`` runs to the
        end of its forward, for its bytes, only the time counts that it needs."""
        if self._is_recomputing and not self.times_early_replays:
            yield
            return
        ends: list[Stamp] = []
        if frame is not None and frame.tail is not None:
            frame.tail = partial(_stamp, self._clock, ends, frame.tail)
        start = self._clock.stamp()
        yield
        ends.append(self._clock.stamp())
        self._current_replays.append(_Replay(visit, region, start, ends[0], ends[-1], self._is_recomputing))

    def end(self) -> None:
        self.steps.append((self._current, self._current_replays))

    def spans(self) -> list[list[Span]]:
        """The spans of the kept steps, the latest step last."""
        seconds = self._clock.reader()
        spans_of_steps = []
        for step, replays in self.steps:
            inside: defaultdict[Visit, float] = defaultdict(float)
            tails: defaultdict[Visit, float] = defaultdict(float)
            for replay in replays:
                if not replay.is_early:
                    inside[replay.visit] += seconds(replay.end) - seconds(replay.start)
                    tails[replay.visit] += seconds(replay.after_tail) - seconds(replay.end)
            spans = []
            for action, due, start, end in step:
                tail = tails[action.visit] if action.kind in BACKWARDS else 0.0
                spans.append(Span(action, seconds(due), seconds(start), seconds(end) - tail))
            spans_of_steps.append(replays_apart(spans, inside))
        return spans_of_steps

    def replay_seconds(self) -> dict[int, dict[int, float]]:
        """The medians of the replays of each region, by stage. The first of several steps is warm-up."""
        seconds, replays = self._clock.reader(), [replays for _, replays in self.steps]
        times: defaultdict[int, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for (stage, _), region, start, end, *_ in chain.from_iterable(replays[1:] or replays):
            times[stage][region].append(seconds(end) - seconds(start))
        return {stage: {region: median(each) for region, each in regions.items()} for stage, regions in times.items()}


def _stamp(clock: Clock, stamps: list[Stamp], then: Callable[[], object]) -> None:
    stamps.append(clock.stamp())
    then()


def with_seconds(stage: Stage, seconds: Mapping[int, float]) -> Stage:
    """``stage``, with the seconds of the replays of its blocks."""
    blocks = (replace(block, recompute_seconds=seconds.get(n, 0.0)) for n, block in enumerate(stage.blocks))
    return replace(stage, blocks=tuple(blocks))
