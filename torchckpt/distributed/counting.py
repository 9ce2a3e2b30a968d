"""Counting: the bytes of one step, those that the regions of a stage save and those that are alive in each action."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.planning import Action, Stage, fixed
from torchckpt.planning.step.memory import Level
from torchckpt.regions.core.frame import Frame, SavedTensors
from torchckpt.regions.core.options import Options
from torchckpt.regions.core.scope import AroundRegion, Keep, Scope
from torchckpt.regions.live import LiveStorages
from torchckpt.regions.private import look_through
from torchckpt.regions.saved import storage_of
from torchckpt.typing import Function

__all__ = ["CountingScope", "LiveBytes"]

class CountingScope(Scope):
    """A scope that counts the bytes that one forward saves, and later the replays of its regions.

    Parameters and buffers do not count, nor do storages that are not new. Each storage counts once.

    Args:
        module: the module of the stage.
        is_new: returns whether a storage was made in this step.
    """

    def __init__(
        self, keep: Keep, around: AroundRegion, module: nn.Module, is_new: Callable[[StorageWeakRef], bool]
    ) -> None:
        super().__init__(keep, around)
        self._module, self._is_new, self._is_inside = module, is_new, False
        self._before_bytes = self._after_bytes = 0.0  # outside of regions
        self._boundary_bytes: list[float] = []  # by region, what stays if it is recomputed
        self._inner_bytes: list[float] = []  # by region, what stays beside that if it is kept
        self._seen: set[StorageWeakRef] = set()
        self._pass_over_parameters()

    @property
    def stage(self) -> Stage:
        """The bytes of the stage, without seconds. A stage that keeps its activations is one block."""
        if self.keep:
            total = self._before_bytes + self._after_bytes + sum(self._boundary_bytes)
            return Stage((replace(fixed(), saved_bytes=total),))
        blocks = (
            replace(fixed(), saved_bytes=boundary + inner, boundary_bytes=boundary)
            for boundary, inner in zip(self._boundary_bytes, self._inner_bytes)
        )
        return Stage(tuple(blocks), fixed(saved_bytes=self._before_bytes), fixed(saved_bytes=self._after_bytes))

    def run(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> tuple[Any, Frame | None]:
        if self._is_inside:
            return super().run(function, args, kwargs, options)
        self._is_inside = True
        self._boundary_bytes.append(0.0)
        self._inner_bytes.append(0.0)
        try:
            return super().run(function, args, kwargs, options)
        finally:
            self._is_inside = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        with super().entered(), saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def replayed(self, region: int, recomputed: deque[SavedTensors]) -> None:
        """Count the saved tensors of a region. Call it right after the replay."""
        self._pass_over_parameters()  # which may be gathered from other ranks only now
        self._inner_bytes[region] = self._claimed([tensor for saved in recomputed for tensor, _ in saved])

    def _pack(self, tensor: Tensor) -> Tensor:
        whole = tensor if tensor._base is None else tensor._base
        claimed_bytes = 0.0 if isinstance(whole, nn.Parameter) else self._claimed([tensor])
        if self._is_inside:  # a region's forward saves only its boundary
            self._boundary_bytes[-1] += claimed_bytes
        elif not self.regions:
            self._before_bytes += claimed_bytes
        else:
            self._after_bytes += claimed_bytes
        return tensor if tensor.is_leaf else tensor.detach()

    def _pass_over_parameters(self) -> None:
        tensors = (*self._module.parameters(), *self._module.buffers())
        self._seen |= {storage for tensor in tensors for storage in storage_of(tensor)}

    def _claimed(self, tensors: Sequence[Tensor]) -> float:
        """The bytes of the storages of ``tensors`` that were not counted before."""
        total = 0
        for tensor in tensors:
            for storage, size in storage_of(tensor).items():
                if storage not in self._seen and self._is_new(storage):
                    self._seen.add(storage)
                    total += size
        return float(total)


look_through(CountingScope._pack)


class LiveBytes(LiveStorages):  # type: ignore[no-untyped-call]  # in torch
    """Counts what is alive in each action of a step.

    Args:
        more_bytes: added to the levels of every action.
    """

    def __init__(self, device: torch.device, looks: bool = True, more_bytes: float = 0.0) -> None:
        super().__init__(device, looks)
        self._more_bytes = more_bytes
        self._action: Action | None = None
        self._entered_bytes = 0.0
        self.levels: dict[Action, Level] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A context around the step."""
        if self.looks:
            with self:
                yield
        else:
            yield
        self.reaches(None)

    def reaches(self, action: Action | None) -> None:
        """Note that ``action`` begins. It lasts until the next call; None ends the last action."""
        highest = self.highest()
        self.begin()
        if self._action is not None and (self.looks or self.allocator):
            amounts = highest, self.now(), self._entered_bytes
            self.levels[self._action] = Level(*(amount + self._more_bytes for amount in amounts))
        self._action, self._entered_bytes = action, 0.0

    def replays(self) -> None:
        """Note that the current action starts a replay."""
        self._entered_bytes = self._entered_bytes or float(self.highest())
