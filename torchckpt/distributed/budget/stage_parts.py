"""Stage parts: the bytes and seconds of each region of a stage, for one micro-batch, measured with all recomputed."""
from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.planning import Block, Stage, fixed
from torchckpt.regions.clock import Stamp
from torchckpt.regions.core.frame import Frame, SavedTensors
from torchckpt.regions.core.options import Options
from torchckpt.regions.core.scope import AroundRegion, Scope
from torchckpt.regions.private import look_through
from torchckpt.regions.saved import storage_of
from torchckpt.typing import Function

__all__ = ["CountingScope", "Parts", "Seconds", "stage_of"]

_SHORT_SECONDS, _SMALL_BYTES = 1e-9, 1.0
"""The least seconds and bytes of a region: used if the clock measures no time, or if the region saves nothing."""


@dataclass
class Parts:
    """The bytes of one stage. Parameters, buffers and storages from before the step do not count."""

    before_bytes: float = 0.0
    """Saved before the first region."""
    after_bytes: float = 0.0
    """Saved outside regions, after the first region began."""
    boundary_bytes: list[float] = field(default_factory=list)
    """For each region, the bytes kept if it is recomputed."""
    inner_bytes: list[float] = field(default_factory=list)
    """For each region, the further bytes kept if it keeps its activations."""


class Seconds:
    """The seconds of the replays of regions, by stage."""

    def __init__(self) -> None:
        self._stamps: list[tuple[int, int, Stamp, Stamp]] = []

    def add(self, stage: int, region: int, start: Stamp, end: Stamp) -> None:
        self._stamps.append((stage, region, start, end))

    def __len__(self) -> int:
        return len(self._stamps)

    def forget(self, kept: int) -> None:
        """Forget all replays but the first ``kept``."""
        del self._stamps[kept:]

    def medians(self, seconds: Callable[[Stamp], float]) -> dict[int, dict[int, float]]:
        found: defaultdict[int, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for stage, region, start, end in self._stamps:
            found[stage][region].append(seconds(end) - seconds(start))
        return {stage: {region: median(each) for region, each in own.items()} for stage, own in found.items()}


class CountingScope(Scope):
    """A scope that counts, for every region, the bytes that the forward saves. No region keeps its activations.

    Args:
        module: the module of the stage; its parameters and buffers do not count.
        is_new: returns whether a storage was made in this step.
    """

    def __init__(self, module: nn.Module, is_new: Callable[[StorageWeakRef], bool], around: AroundRegion) -> None:
        super().__init__(False, around)
        self.parts = Parts()
        self._is_new, self._is_inside = is_new, False
        own = (*module.parameters(), *module.buffers())
        self._seen = {storage for tensor in own for storage in storage_of(tensor)}

    def run(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> tuple[Any, Frame | None]:
        if self._is_inside:
            return super().run(function, args, kwargs, options)
        self._is_inside = True
        self.parts.boundary_bytes.append(0.0)
        self.parts.inner_bytes.append(0.0)
        try:
            return super().run(function, args, kwargs, options)
        finally:
            self._is_inside = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A context around the forward."""
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def replayed(self, region: int, recomputed: deque[SavedTensors]) -> None:
        """Count the saved tensors of a region. Call it right after the replay."""
        fresh = [tensor for saved in recomputed for tensor, _ in saved]
        self.parts.inner_bytes[region] = float(self._claimed(fresh))

    def _pack(self, tensor: Tensor) -> Tensor:
        amount_bytes = float(self._claimed([tensor]))
        if self._is_inside:  # a region's forward saves only its boundary
            self.parts.boundary_bytes[-1] += amount_bytes
        elif not self.regions:
            self.parts.before_bytes += amount_bytes
        else:
            self.parts.after_bytes += amount_bytes
        return tensor if tensor.is_leaf else tensor.detach()

    def _claimed(self, tensors: Sequence[Tensor]) -> int:
        """The bytes of the storages of ``tensors`` that were not counted before."""
        total = 0
        for tensor in tensors:
            for storage, size in storage_of(tensor).items():
                if storage not in self._seen and self._is_new(storage):
                    self._seen.add(storage)
                    total += size
        return total


look_through(CountingScope._pack)


def stage_of(parts: Parts, costs: Block | Stage, seconds: Mapping[int, float]) -> Stage:
    """The stage in the type that the planner takes.

    The forward of a region takes as long as its replay. The rest of the stage's forward becomes one fixed part.

    Args:
        costs: the seconds of the stage. Its backward must not include recomputation.
        seconds: the seconds of the replay of each region.
    """
    replays = [max(seconds.get(region, 0.0), _SHORT_SECONDS) for region in range(len(parts.boundary_bytes))]
    scale = min(1.0, costs.forward_seconds / sum(replays)) if replays else 1.0
    blocks = []
    for boundary, inner, replay in zip(parts.boundary_bytes, parts.inner_bytes, replays):
        share = replay / sum(replays)
        least = 0.0 if boundary + inner else _SMALL_BYTES
        blocks.append(
            Block(
                forward_seconds=max(replay * scale, _SHORT_SECONDS),
                input_grad_seconds=max(costs.input_grad_seconds * share, _SHORT_SECONDS),
                weight_grad_seconds=costs.weight_grad_seconds * share,
                recompute_seconds=replay,
                saved_bytes=boundary + inner + least,
                boundary_bytes=boundary + least,
            )
        )
    rest = max(0.0, costs.forward_seconds - sum(block.forward_seconds for block in blocks))
    after = fixed(rest, saved_bytes=parts.after_bytes)
    if not blocks:
        halves = costs.input_grad_seconds, costs.weight_grad_seconds
        after = fixed(max(rest, _SHORT_SECONDS), *halves, saved_bytes=parts.after_bytes)
    return Stage(tuple(blocks), fixed(saved_bytes=parts.before_bytes), after)
