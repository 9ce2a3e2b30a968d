"""Collective: one communication between ranks, counted of a model's own code or of a description."""
from __future__ import annotations

from typing import NamedTuple

__all__ = ["HEADS", "Collective"]

HEADS = ("a block", "collective", "over", "bytes", "times")
"""Those of a table of collectives."""


class Collective(NamedTuple):
    """A collective of one rank, and how often it occurs.

    >>> gather = Collective("all_gather", 134217728, 8, "tp", "forward", 2)
    >>> gather.bytes * gather.count
    268435456
    """

    kind: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``broadcast``, ``permute`` (to one rank)."""
    bytes: int
    """Bytes of one rank: the larger of its input and its output."""
    ranks: int
    """The size of the group."""
    dimension: str
    """The name of the mesh's dimension; empty if it is unknown."""
    phase: str
    """``forward``, ``backward``, ``replay`` or ``step``."""
    count: int = 1  # type: ignore[assignment]  # a tuple counts
    """How often it occurs in the phase, of one micro-batch."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Its row in a table."""
        return self.phase, self.kind, f"{self.dimension} ({self.ranks})", f"{self.bytes / 1e6:.4g} MB", f"{self.count}"
