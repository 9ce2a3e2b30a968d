"""Told: what the forward of a stage and micro-batch is told of its regions."""
from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torchckpt.kernel.scope import Keep

__all__ = ["Told"]


@dataclass(frozen=True)
class Told:
    """Regions have the numbers of their forwards. What is neither kept nor early, the backward recomputes."""

    keep: Keep = False
    early: Collection[int] | None = None
    """Those that ``R`` recomputes. None: as the ``segments`` of the schedule say."""
