"""Collective: one communication between ranks, as the costs of a parallel model count it."""
from __future__ import annotations

from typing import NamedTuple

__all__ = ["Collective"]


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
