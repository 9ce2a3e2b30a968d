"""At arrival: recompute inside the backwards, as ``torch.utils.checkpoint`` does it, with a clock."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gpt.model import Block
from torchckpt import checkpoint_module
from torchckpt.distributed import recompute_ahead
from torchckpt.distributed.clock import Clock, Stamp
from torchckpt.model import Kind, StageCosts, Timeline
from torchckpt.model.comparison import Comparison
from torchckpt.model.inside import replays_apart

if TYPE_CHECKING:
    from train_gpt_distributed import Trainer

__all__ = ["at_arrival"]


def at_arrival(trainer: Trainer, costs: Callable[[], tuple[StageCosts, ...]]) -> Callable[[], Comparison]:
    """Have ``trainer`` recompute inside its backwards, on the runtime of ``recompute_ahead``.

    Args:
        costs: by then those of the same stages recomputed ahead, for the bytes that their forwards save.

    Returns:
        What reports on the last step, with an ``R`` for what each backward recomputed.
    """
    watches = {stage.stage_index: Stopwatch(trainer.device) for stage in trainer.stages}
    for stage in trainer.stages:
        for block in stage.submod:
            if isinstance(block, Block):
                checkpoint_module(block, context_fn=watches[stage.stage_index].contexts)
    schedule = trainer.schedule = recompute_ahead(trainer.schedule, segments=0)

    def report() -> Comparison:
        found = schedule.report()
        sizes = [replace(own, saved_bytes=more.saved_bytes) for own, more in zip(found.costs, costs())]
        return replace(found, measured=replays_apart(found.measured, replays(found.measured, watches), sizes))

    return report


class Stopwatch:
    """How long each replay of a stage took; ``contexts`` is what its regions take as ``context_fn``."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._replays: list[tuple[Stamp, Stamp]] = []

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._timed()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = self._clock.stamp()
        try:
            yield
        finally:
            self._replays.append((start, self._clock.stamp()))

    def seconds(self) -> list[float]:
        """Of the replays since the last call, in order."""
        found, self._replays = self._replays, []
        return [self._clock.seconds(end) - self._clock.seconds(start) for start, end in found]


def replays(timeline: Timeline, watches: dict[int, Stopwatch]) -> dict[tuple[int, int], list[float]]:
    """By stage and micro-batch, of all processes."""
    mine: dict[tuple[int, int], list[float]] = {}
    for stage, watch in watches.items():
        backwards = [one.action for one in timeline.events if one.action[:2] == (stage, Kind.BACKWARD)]
        seconds = watch.seconds()
        count = len(seconds) // len(backwards)
        for place, action in enumerate(backwards):
            mine[stage, action.micro_batch] = seconds[place * count : (place + 1) * count]
    said: list[dict[tuple[int, int], list[float]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(said, mine)
    return {visit: seconds for one in said for visit, seconds in one.items()}
