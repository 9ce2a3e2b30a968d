"""Frames: holds the frames of this rank's regions, by stage and micro-batch, until they are recomputed."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchckpt.distributed.private import in_backward
from torchckpt.modules import module_of
from torchckpt.planning import Choice, Kind, State
from torchckpt.planning.order.schedule import Visit
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.scope import Scope

__all__ = ["Frames"]


class Frames:
    """The frames of one schedule. ``gathered()`` is a context around a forward, ``recompute()`` is the action.

    Args:
        segments: how many regions of a stage ``State.EARLY`` means, the last ones; None for all.
    """

    def __init__(self, segments: int | None) -> None:
        self._segments = segments
        self._waiting: dict[Visit, list[Frame]] = {}
        self._sharded: dict[nn.Module, list[FSDPModule]] = {}  # by the module of a stage
        self._used: dict[object, list[FSDPModule]] = {}  # by the module that a region calls

    @contextmanager
    def gathered(self, visit: Visit, scope: Scope, choice: Choice | State) -> Iterator[None]:
        """Inside the block, the regions that this thread enters belong to ``visit``, and to ``scope``."""
        with scope.entered():
            yield
        if isinstance(choice, Choice):
            early = choice.restored_by(Kind.RECOMPUTE)
            self._waiting[visit] = [frame for at, frame in zip(scope.numbers, scope.frames) if at in early]
        elif choice.restored_by is Kind.RECOMPUTE:
            late = 0 if self._segments is None else max(0, len(scope.frames) - self._segments)
            self._waiting[visit] = scope.frames[late:]

    def recompute(self, visit: Visit, module: nn.Module) -> None:
        """Replay the waiting frames, the last one first. The backward replays the others.

        Args:
            module: the module of the stage.
        """
        if module not in self._sharded:
            self._sharded[module] = [child for child in module.modules() if isinstance(child, FSDPModule)]
        sharded, frames = self._sharded[module], self._waiting.pop(visit, [])
        while frames:
            frame = frames.pop()
            if sharded:
                self._recompute_gathered(frame, sharded)
            else:
                frame.recompute()

    def drop(self, visit: Visit) -> None:
        """Forget the waiting frames: their backward begins, and replays what is left."""
        self._waiting.pop(visit, None)

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


def _is_in_line(module: Any, other: nn.Module) -> bool:
    """Whether one of the two modules is, or contains, the other."""
    return any(child is other for child in module.modules()) or any(child is module for child in other.modules())
