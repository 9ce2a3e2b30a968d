"""Dropping and Replaying: the two modes that a thread runs a region's function in.

Each installs its saved-tensor hooks and flags for a ``with`` block, and puts back what was there.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchckpt.kernel import norms
from torchckpt.kernel.ambient import RandomState
from torchckpt.kernel.flags import flags
from torchckpt.kernel.private import pop_hooks, push_hooks, set_grad_enabled

__all__ = ["Dropping", "Replaying"]


class Dropping:
    """A forward: what autograd saves goes through ``pack`` and comes back through ``unpack``."""

    __slots__ = ("_before", "_pack", "_unpack")

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        self._pack, self._unpack = pack, unpack

    def __enter__(self) -> None:
        push_hooks(self._pack, self._unpack)
        self._before = flags.checkpointing
        flags.checkpointing = True

    def __exit__(self, *_: object) -> None:
        flags.checkpointing = self._before
        pop_hooks()


class Replaying:
    """A replay: in grad mode, from the random state of the forward; what autograd saves goes through ``pack``.

    Norm layers keep their statistics.
    """

    __slots__ = ("_before", "_graded", "_pack", "_random")

    def __init__(self, pack: Callable[[Tensor], Tensor], random: RandomState | None) -> None:
        self._pack, self._random = pack, random

    def __enter__(self) -> None:
        push_hooks(self._pack, _same)
        self._graded = torch.is_grad_enabled()
        set_grad_enabled(True)
        self._before = flags.checkpointing, flags.recomputing, flags.norm_layers
        flags.checkpointing, flags.recomputing, flags.norm_layers = False, True, []
        norms.watch(self)
        if self._random is not None:
            self._random.replay()

    def __exit__(self, *_: object) -> None:
        if self._random is not None:
            self._random.resume()
        norms.unwatch(self)
        layers = flags.norm_layers
        flags.checkpointing, flags.recomputing, flags.norm_layers = self._before
        if layers:
            norms.give_back(layers)
        set_grad_enabled(self._graded)
        pop_hooks()


def _same(tensor: Tensor) -> Tensor:
    return tensor
