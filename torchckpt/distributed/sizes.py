"""Sizes: the bytes that one micro-batch keeps on each stage of this rank, counted in the first step."""
from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.kernel.region.frame import Frame, SavedTensors
from torchckpt.kernel.saved import bytes_of, saved_bytes

__all__ = ["Size", "Sizes"]


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
