"""Frames: what the stages of this rank checkpointed, by stage and micro-batch, until it is recomputed."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchckpt.distributed.private import in_backward
from torchckpt.kernel.frame import Around, Frame
from torchckpt.kernel.scope import Scope

__all__ = ["Frames"]


class Frames:
    """One per schedule. ``gathered()`` is around a forward, ``recompute()`` is the action."""

    def __init__(self, segments: int | None) -> None:
        self._segments = segments
        self._waiting: dict[tuple[int, int], list[Frame]] = {}

    @contextmanager
    def gathered(
        self, stage: int, micro_batch: int, keep: bool, around: Around | None = None
    ) -> Iterator[list[Frame]]:
        """Within, regions that this thread enters are of this stage and micro-batch; with ``keep`` they are none.

        Args:
            around: entered around each replay, early or late, with the slots that it fills.
        """
        scope = Scope(keep, around)
        with scope.entered():
            yield scope.frames
        self._waiting[stage, micro_batch] = scope.frames

    def waiting(self, stage: int, micro_batch: int) -> tuple[Frame, ...]:
        """Those that have not been recomputed."""
        return tuple(self._waiting.get((stage, micro_batch), ()))

    def recompute(self, stage: int, micro_batch: int, module: nn.Module) -> None:
        """Replay them, the last one first, as far as ``segments`` goes; the backward replays the rest.

        Args:
            module: the module of the stage.
        """
        frames = self._waiting.pop((stage, micro_batch), [])
        early = len(frames) if self._segments is None else min(self._segments, len(frames))
        sharded = [child for child in module.modules() if isinstance(child, FSDPModule)]
        while early > 0:
            frame, early = frames.pop(), early - 1
            if sharded:
                _recompute_gathered(frame, sharded)
            else:
                frame.recompute()

    def drop(self, stage: int, micro_batch: int) -> None:
        """Their backward begins: nothing is left to do early."""
        self._waiting.pop((stage, micro_batch), None)

    def clear(self) -> None:
        self._waiting.clear()


def _recompute_gathered(frame: Frame, sharded: Sequence[FSDPModule]) -> None:
    """With the parameters that the replay uses gathered, as FSDP2 would do it at the region's backward, which then
    finds them so and gathers nothing."""
    for module in _used_by(frame, sharded):
        module.unshard()
    with in_backward([module for module in sharded if isinstance(module, nn.Module)]):
        frame.recompute()


def _used_by(frame: Frame, sharded: Sequence[FSDPModule]) -> list[FSDPModule]:
    """Those that hold, or are held by, the module that the region calls; all where that is not known."""
    function = frame.function
    called = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    if not isinstance(called, nn.Module):
        return list(sharded)
    inside: set[object] = set(called.modules())
    return [one for one in sharded if one in inside or (isinstance(one, nn.Module) and called in set(one.modules()))]
