"""Region options: says which regions of one forward keep their activations, and which are recomputed early."""
from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torchckpt.kernel.region.scope import Keep

__all__ = ["RegionOptions"]


@dataclass(frozen=True)
class RegionOptions:
    """Regions are numbered in the order of their forwards. The backward recomputes all that are in neither field."""

    keep: Keep = False
    early: Collection[int] | None = None
    """The regions that the recompute action ``R`` replays. None: as many as the ``segments`` of the schedule say."""
