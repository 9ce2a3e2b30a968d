"""Counting: a scope that counts the bytes that the regions of a stage save."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.measuring.saved import RegionBytes
from torchckpt.planning import Stage, fixed
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.options import Options
from torchckpt.regions.core.scope import AroundRegion, Keep, Scope
from torchckpt.typing import Function

__all__ = ["CountingScope"]


class CountingScope(Scope):
    """A scope that counts the bytes that one forward saves, and later the replays of its regions.

    Args:
        module: the module of the stage.
        is_new: returns whether a storage was made in this step.
    """

    def __init__(
        self, keep: Keep, around: AroundRegion, module: nn.Module, is_new: Callable[[StorageWeakRef], bool]
    ) -> None:
        super().__init__(keep, around)
        self._bytes = RegionBytes([module], is_new)

    @property
    def stage(self) -> Stage:
        """The bytes of the stage, without seconds. A stage that keeps its activations is one block."""
        stage = self._bytes.stage
        if self.keep:
            return Stage((replace(fixed(), saved_bytes=stage.saved_bytes),))
        return stage

    def run(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> tuple[Any, Frame | None]:
        if self._bytes.is_in_region:
            return super().run(function, args, kwargs, options)
        with self._bytes.region((args, kwargs)):
            return super().run(function, args, kwargs, options)

    @contextmanager
    def entered(self) -> Iterator[None]:
        with super().entered(), self._bytes.counted():
            yield

    def replayed(self, region: int, frame: Frame) -> None:
        """Count the saved tensors of a region. Call it right after the replay."""
        self._bytes.replayed(region, frame)
