"""TorchRegion: what ``keep`` needs of a region of ``torch.utils.checkpoint``, which is none of ours."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint
from torch import Tensor

from torchckpt.regions.kept.record import KeptCalls
from torchckpt.regions.private import frame_of_torch
from torchckpt.regions.state.ambient import Generator, generators_of
from torchckpt.regions.state.streams import accelerators_among
from torchckpt.typing import Function

__all__ = ["TorchRegion", "torch_region"]


class TorchRegion:
    """One region of torch in one forward, as long as torch's own frame lives. It looks to ``keep`` like a ``Frame``."""

    checks, saved, module_state = True, None, None
    function: Function = staticmethod(torch.utils.checkpoint.checkpoint)

    def __init__(self) -> None:
        self.kept: KeptCalls | None = None
        self._replay: object = None

    def replays(self, generator: Generator, before: Tensor) -> bool:
        """Whether ``generator`` is where the forward had it: torch does not tell what it puts back."""
        return torch.equal(generator.get_state(), before)

    @property
    def generators(self) -> list[Generator]:
        """The generators whose states a replay may put back."""
        return list(generators_of(accelerators_among((), {}), ()))

    def is_in(self, replay: object) -> None:
        """Note that ``replay`` is under way. A new one has taken nothing so far."""
        if self._replay is not replay:
            self._replay = replay
            if self.kept is not None:
                self.kept.begin(None)


_regions: WeakKeyDictionary[Any, TorchRegion] = WeakKeyDictionary()


def torch_region(pack: Callable[[Tensor], Any]) -> tuple[TorchRegion, bool] | None:
    """The region whose hook ``pack`` is, and whether it is replayed. None for a hook of no region of torch."""
    entered = frame_of_torch(pack)
    if entered is None:
        return None
    frame, is_replayed = entered
    region = _regions.get(frame)
    if region is None:
        region = _regions[frame] = TorchRegion()
    if is_replayed:
        region.is_in(pack)
    return region, is_replayed
