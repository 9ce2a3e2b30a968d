"""Frames: holds the frames of this rank's regions, by stage and micro-batch, until they are recomputed."""
from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchckpt.distributed.private import in_backward
from torchckpt.modules import module_of
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.scope import Keep, Scope

__all__ = ["Frames", "RegionOptions"]

class Frames:
    """The frames of one schedule. ``gathered()`` is a context around a forward, ``recompute()`` is the action."""

    def __init__(self, segments: int | None) -> None:
        self._segments = segments
        self._waiting: dict[tuple[int, int], list[Frame]] = {}
        self._sharded: dict[nn.Module, list[FSDPModule]] = {}  # by the module of a stage
        self._used: dict[object, list[FSDPModule]] = {}  # by the module that a region calls

    @contextmanager
    def gathered(
        self, stage: int, micro_batch: int, scope: Scope, early: Collection[int] | None = None
    ) -> Iterator[list[Frame]]:
        """Inside the block, the regions that this thread enters belong to this stage and micro-batch, and to ``scope``.

        Args:
            early: the numbers of the regions that :meth:`recompute` replays. None: the last ``segments`` regions.
        """
        with scope.entered():
            yield scope.frames
        numbered = zip(scope.numbers, scope.frames)
        waiting = scope.frames if early is None else [frame for number, frame in numbered if number in early]
        self._waiting[stage, micro_batch] = waiting

    def waiting(self, stage: int, micro_batch: int) -> tuple[Frame, ...]:
        """The frames that have not been recomputed."""
        return tuple(self._waiting.get((stage, micro_batch), ()))

    def recompute(self, stage: int, micro_batch: int, module: nn.Module) -> None:
        """Replay the waiting frames, the last one first, at most ``segments`` of them. The backward replays the rest.

        Args:
            module: the module of the stage.
        """
        frames = self._waiting.pop((stage, micro_batch), [])
        early = len(frames) if self._segments is None else min(self._segments, len(frames))
        if module not in self._sharded:
            self._sharded[module] = [child for child in module.modules() if isinstance(child, FSDPModule)]
        sharded = self._sharded[module]
        while early > 0:
            frame, early = frames.pop(), early - 1
            if sharded:
                self._recompute_gathered(frame, sharded)
            else:
                frame.recompute()

    def drop(self, stage: int, micro_batch: int) -> None:
        """Forget the waiting frames: their backward begins, and replays what is left."""
        self._waiting.pop((stage, micro_batch), None)

    def clear(self) -> None:
        self._waiting.clear()

    def _recompute_gathered(self, frame: Frame, sharded: Sequence[FSDPModule]) -> None:
        """Gather the parameters of the replay, as FSDP2 does at the region's backward, and replay. The backward then
        finds the parameters gathered, and does not gather them again."""
        called = module_of(frame.function)
        if called not in self._used:
            self._used[called] = [fsdp for fsdp in sharded if called is None or _is_in_line(fsdp, called)]
        for module in self._used[called]:
            module.unshard()
        with in_backward(sharded):
            frame.recompute()


def _is_in_line(one: Any, other: nn.Module) -> bool:
    """Whether one of the two modules is, or contains, the other."""
    return any(child is other for child in one.modules()) or any(child is one for child in other.modules())


@dataclass(frozen=True)
class RegionOptions:
    """Regions are numbered in the order of their forwards. The backward recomputes all that are in neither field."""

    keep: Keep = False
    early: Collection[int] | None = None
    """The regions that the recompute action ``R`` replays. None: as many as the ``segments`` of the schedule say."""
