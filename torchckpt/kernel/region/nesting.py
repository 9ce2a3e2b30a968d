"""Nesting: where in regions a call is, by the saved-tensor hooks that its thread has entered."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from torchckpt.kernel.kept.torch_region import TorchRegion, torch_region
from torchckpt.kernel.region.frame import Frame
from torchckpt.kernel.state.boundary import Hooks

__all__ = ["Level", "Region", "level_of"]

Region: TypeAlias = Frame | TorchRegion


class Level(NamedTuple):
    recording: list[Region]
    """The regions whose forward is under way, from the innermost on."""
    replayed: Region | None
    """The one that is replayed around them."""
    around: Sequence[Hooks]
    """The hooks around all of them."""
    others: Sequence[Hooks]
    """All hooks but those of regions."""


def level_of(stack: Sequence[Hooks]) -> Level:
    """Where a call is that has entered ``stack``, the outermost pair first."""
    found = list(map(_region_of, stack))
    others = [hooks for hooks, one in zip(stack, found) if one is None]
    recording: list[Region] = []
    around = stack
    for place, one in reversed(list(enumerate(found))):
        if one is not None:
            region, is_replayed = one
            around = stack[:place]
            if is_replayed:
                return Level(recording, region, around, others)
            recording.append(region)
    return Level(recording, None, around, others)


def _region_of(hooks: Hooks) -> tuple[Region, bool] | None:
    """The region that has entered ``hooks``, and whether it is replayed."""
    pack, unpack = hooks
    owner = getattr(unpack, "__self__", None)
    return (owner, unpack == owner._unpack_in_replay) if isinstance(owner, Frame) else torch_region(pack)
