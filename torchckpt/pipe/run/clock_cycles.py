"""Clock cycles: the order in which GPipe runs the forwards of ``m`` micro-batches through ``p`` stages."""
from __future__ import annotations

from collections.abc import Iterator

__all__ = ["clock_cycles"]


def clock_cycles(m: int, p: int) -> Iterator[list[tuple[int, int]]]:
    """The pairs (micro-batch, stage) of each clock tick. The pairs of one tick do not depend on each other.

    >>> list(clock_cycles(m=3, p=2))
    [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]
    """
    for tick in range(m + p - 1):
        yield [(tick - stage, stage) for stage in range(max(0, tick - m + 1), min(p, tick + 1))]
