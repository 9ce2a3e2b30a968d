"""Count: the bytes and seconds of one step, while it runs.

A step is counted by rank. A device with an allocator that counts is asked. On the CPU operators are watched, by a mode
that is under all others of the thread while the step lasts: each counts for the rank whose action runs.
"""
from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from torchckpt.measuring.live import LiveBytes, Watch
from torchckpt.measuring.record import Record, with_seconds
from torchckpt.measuring.saved import CountedFrame, RegionBytes
from torchckpt.pipe.partition import Stage
from torchckpt.planning import Action, Kind, Schedule
from torchckpt.planning import Stage as Work
from torchckpt.planning.order.schedule import Visit
from torchckpt.planning.plan.run.extra_memory import with_gradients
from torchckpt.planning.step.measured import Span, Spans
from torchckpt.planning.step.memory import Level
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.options import Options
from torchckpt.regions.private import after_backward, keep_from_dynamo, put_under_modes
from torchckpt.regions.wrap.mixin import are_compiled
from torchckpt.tensors import gradient_bytes, nodes_behind

__all__ = ["Count", "Counted"]

_COUNTED = 0
"""The micro-batch whose visits are counted by region."""


class Counted(NamedTuple):
    """What one step took. Lists have an entry for each rank."""

    blocks: tuple[Work, ...]
    """The bytes of each stage, and the seconds of the replays of its blocks; empty if they were not counted."""
    times: list[list[Span]]
    """The actions that were reached, with the replays apart."""
    levels: list[dict[Action, Level]]
    """The bytes in each action, beyond those before the step; empty if they are not known."""
    lost_bytes: Sequence[float] = ()  # from before the step, which has freed them

    @property
    def peak_bytes(self) -> list[float]:
        return [max((max(level.highest, level.entered) for level in of.values()), default=0.0) for of in self.levels]

    @property
    def shown(self) -> list[dict[Action, Level]]:
        """The levels, with what was there when an action began."""
        return [{a: level._replace(highest=max(level.highest, level.entered)) for a, level in of.items()}
                for of in self.levels]

    def spans(self, actions: Sequence[Sequence[Action]]) -> Spans:
        """The times of ``actions``. What was not reached takes no time."""
        spans: list[list[Span]] = []
        for times, order in zip(self.times, actions):
            left: defaultdict[Action, list[Span]] = defaultdict(list)
            for span in times:
                left[span.action].append(span)
            now = min((span.start_seconds for span in times), default=0.0)
            spans.append([])
            for action in order:
                spans[-1].append(left[action].pop(0) if left[action] else Span(action, now, now, now))
                now = spans[-1][-1].end_seconds
        return spans


class Count:
    """What one step takes.

    Args:
        watch: the mode of the pipe.
        schedule, inputs: its ranks, each of which has stages on one device; and what the step is given.
        counts_blocks: whether what a visit of each stage saves is counted by block. All blocks are recomputed then.
        in_graph: whether one backward has all micro-batches. Then autograd adds up their gradients beside those that
            are there, so these do not count as if the step made them. Nor do they in a step of a plan, which is shown
            as it was.
        learn: gets what was counted; None: a backward could not be counted.
    """

    def __init__(
        self,
        watch: Watch,
        schedule: Schedule,
        stages: Sequence[Stage],
        inputs: Any,
        counts_blocks: bool,
        in_graph: bool,
        learn: Callable[[Counted | None], None],
    ) -> None:
        self._placement = schedule.placement
        devices = [stages[schedule.placement.index(rank)].device for rank in range(len(schedule.ranks))]
        self._records = [Record(device) for device in devices]
        modules = [module for stage in stages for owner in stage.modules for module in owner.modules()]
        looks = all(device.type == "cpu" for device in devices) and not are_compiled(modules)
        parameters = {stage.number: [x for owner in stage.modules for x in owner.parameters()] for stage in stages}
        self._gradient_bytes = gradient_bytes(parameters) if counts_blocks and not in_graph else {}
        self._parameters = [parameter for own in parameters.values() for parameter in own]
        if not looks:
            gc.collect()  # what is freed in the middle of the step would count as freed by it
        self._live = [LiveBytes(device, looks, self._parameters, inputs) for device in devices]
        self._watch, self._learn, self._in_graph = watch, learn, in_graph
        if looks:
            put_under_modes(watch)
        self._saved = {
            stage.number: RegionBytes(stage.modules, self._live[self._placement[stage.number]].__contains__)
            for stage in (stages if counts_blocks else ())
        }
        self._open: dict[int, tuple[Action, Any]] = {}
        """By rank, the backward that has begun and not ended."""
        self._begun: set[Action] = set()
        self._awaited: set[Visit] = set()
        self._is_in_backward = self._is_done = False

    # what a step tells ----------------------------------------------------------------------------------------------

    @contextmanager
    def acting(self, action: Action) -> Iterator[None]:
        """A context around an action."""
        if self._is_done:
            yield
            return
        record, saved = self._records[self._placement[action.stage]], self._saved.get(action.stage)
        is_counted = saved is not None and action.kind is Kind.FORWARD and action.micro_batch == _COUNTED
        with self._watched(action), saved.counted() if saved and is_counted else nullcontext():
            start = record.awaits()
            if action.kind is Kind.RECOMPUTE:
                with record.recomputing(action):
                    yield
            else:
                yield
                record.ended(action, start)

    def frame(self, visit: Visit, block: int, options: Options) -> Frame:
        """The frame for a block of a visit."""
        saved = self._saved.get(visit[0]) if visit[1] == _COUNTED else None
        frame = CountedFrame(options, saved, partial(self._live[self._placement[visit[0]]].passes, block))
        frame.around = partial(self._replaying, visit, block)
        return frame

    def forwarded(self, visit: Visit, arrived: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Note when the backward of a visit begins and ends, in the backward of the whole graph."""
        before = {tensor.grad_fn for tensor in arrived}
        first = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None and tensor.grad_fn not in before]
        if not first:
            return
        action = Action(visit[0], Kind.BACKWARD, visit[1])
        self._awaited.add(visit)
        for node in dict.fromkeys(first):
            node.register_prehook(partial(self._begins, action))
        last = _last_nodes(first, before)
        left = set(range(len(last)))  # not the nodes: they would hold themselves, by their hooks
        for number, node in enumerate(last):
            node.register_hook(partial(self._ran, action, left, number))

    def finish(self) -> None:
        """The step has ended: learn what was counted, unless it was cut."""
        if self._is_done:
            return
        self.cut()
        for live in self._live:
            live.reaches(None)
        for record in self._records:
            record.end()
        levels = [with_gradients(live.levels, self._gradient_bytes) for live in self._live]
        seconds = {stage: replays for record in self._records for stage, replays in record.replay_seconds().items()}
        blocks = (with_seconds(saved.stage, seconds.get(stage, {})) for stage, saved in self._saved.items())
        lost = [live.lost(self._parameters) for live in self._live]
        self._learn(Counted(tuple(blocks), [record.spans()[-1] for record in self._records], levels, lost))

    def cut(self) -> None:
        """Count no further. Of a step that has not ended nothing is learned: the rest of it may take more."""
        self._is_done = True
        self._watch.stop()

    def disturbed(self) -> None:
        """The backward of another forward has begun. If the step has not ended, it cannot be counted."""
        if not self._is_done:
            self.cut()
            self._learn(None)

    # how ------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _replaying(self, visit: Visit, block: int, frame: Frame) -> Iterator[None]:
        rank, saved = self._placement[visit[0]], self._saved.get(visit[0])
        counted = None if saved is None else frame
        with self._live[rank].replaying(block, counted), self._records[rank].replaying(visit, block, counted):
            yield
        if saved is not None and visit[1] == _COUNTED:
            saved.replayed(block, frame)

    @contextmanager
    def _watched(self, action: Action) -> Iterator[None]:
        before, live = self._watch.live, self._live[self._placement[action.stage]]
        self._reaches(action)
        try:
            yield
            if action.kind is Kind.FORWARD:
                live.ends()  # what comes then, such as the loss, comes on top of what was kept
                before = live if self._in_graph else before
        finally:
            self._watch.live = before

    def _reaches(self, action: Action) -> None:
        self._watch.live = self._live[self._placement[action.stage]]
        self._watch.live.reaches(action)

    def _begins(self, action: Action, _: object) -> None:
        rank = self._placement[action.stage]
        if self._is_done:
            return  # it was cut, or this is a second backward through the same graph
        if not self._is_in_backward:
            self._is_in_backward = True
            after_backward(self._after)
        self._watch.live = self._live[rank]
        if action in self._begun:
            return  # by another output
        self._begun.add(action)
        self._ends_open(rank)
        self._reaches(action)
        self._open[rank] = action, self._records[rank].awaits()

    def _ran(self, action: Action, left: set[int], number: int, *_: object) -> None:
        left.discard(number)
        rank = self._placement[action.stage]
        if not left and self._open.get(rank, (None,))[0] == action:
            self._ends_open(rank)

    def _ends_open(self, rank: int) -> None:
        if rank in self._open:
            action, start = self._open.pop(rank)
            self._awaited.discard(action.visit)
            self._records[rank].ended(action, start)

    def _after(self) -> None:
        self._is_in_backward = False
        if self._is_done:
            return
        for rank in range(len(self._records)):
            self._ends_open(rank)
        self._watch.live = None
        if self._awaited:
            self._learn(None)
        else:
            self.finish()


keep_from_dynamo(Count._begins, Count._ran, Count._after)


def _last_nodes(first: Sequence[Any], before: set[Any]) -> list[Any]:
    """The nodes of a visit that run last in its backward: behind them are its inputs and parameters alone."""

    def counts(node: Any) -> bool:
        return node not in before and bool(node.next_functions)

    nodes = nodes_behind(first, counts)
    return [node for node in nodes if not any(one is not None and counts(one) for one, _ in node.next_functions)]
