"""Sizes: the bytes that one micro-batch keeps on each stage of this rank, counted in the first step."""
from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from torchckpt.kernel.region.frame import Frame, SavedTensors
from torchckpt.kernel.saved import bytes_of, saved_bytes

__all__ = ["Size", "Sizes"]


@dataclass
class Size:
    """The bytes that one micro-batch keeps on one stage. Parameters do not count."""

    saved_bytes: float | None = None
    """The bytes that its forward saves if it keeps its activations; None if not counted yet."""
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
        self._to_count: dict[int, tuple[int, int]] = {}  # by stage: micro-batch, regions left to count

    @contextmanager
    def of_forward(self, stage: int, keep: bool, frames: Sequence[Frame]) -> Iterator[None]:
        """A context around a forward. At its end, ``frames`` must hold the frames of the forward's regions."""
        size = self.found.setdefault(stage, Size())
        if (size.saved_bytes if keep else size.boundary_bytes) is not None:
            yield
            return
        with saved_bytes() as saved:
            yield
        if keep:
            size.saved_bytes = saved.total
        else:
            size.boundary_bytes = saved.total
            size.regions = len(frames)
            size.early = size.regions if self._segments is None else min(self._segments, size.regions)

    @contextmanager
    def of_replay(
        self, stage: int, micro_batch: int, recomputed: deque[SavedTensors], module: nn.Module
    ) -> Iterator[None]:
        """A context around the replay of one region, which fills ``recomputed``."""
        yield
        size = self.found.setdefault(stage, Size())
        if size.saved_bytes is None:
            size.saved_bytes, self._to_count[stage] = 0.0, (micro_batch, size.regions)
        counted, left = self._to_count.get(stage, (micro_batch, 0))
        if counted == micro_batch and left:
            fresh = [tensor for saved in recomputed for tensor, _ in saved]
            size.saved_bytes += bytes_of(fresh, but=module.parameters())
            self._to_count[stage] = micro_batch, left - 1
