"""Select: choose the separating values to keep, so that all other values can be recomputed late."""
from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence, Set
from itertools import accumulate

from torchckpt.planning.remat.flow.dataflow import Dataflow
from torchckpt.planning.remat.flow.late import late
from torchckpt.planning.remat.flow.memory import simulate

__all__ = ["evenly", "every_sqrt", "falling", "least_peak"]

SHARES = (0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0)
"""The counts that are tried, as multiples of the square root: sizes of gradients and workspaces move the best one."""


def every_sqrt(flow: Dataflow, separating: Sequence[int]) -> frozenset[int]:
    """About sqrt(n) of n separating storages. Empty if there are none.

    This is the 'memory' policy of TensorFlow's memory-saving gradients (Salimans and Bulatov, 2018), after Chen et al.
    (2016). That policy tries one count, with equal bytes of the forward between storages. This one tries several counts
    around sqrt(n), and also gaps that get shorter to the end: the last gap is recomputed first, while all kept storages
    are alive. It takes the set whose schedule needs the least memory.

    Args:
        separating: as :func:`~torchckpt.planning.remat.flow.late.separating_storages` finds them, in their order.
    """
    counts = {max(1, round(math.sqrt(len(separating)) * share)) for share in SHARES}
    ways = (evenly, falling)
    return least_peak(flow, [way(flow, separating, count) for count in sorted(counts) for way in ways])


def evenly(flow: Dataflow, separating: Sequence[int], count: int) -> frozenset[int]:
    """At most ``count`` of the storages, those that split the bytes of the forward best into ``count + 1`` parts."""
    return _at(flow, separating, [part / (count + 1) for part in range(1, count + 1)])


def falling(flow: Dataflow, separating: Sequence[int], count: int) -> frozenset[int]:
    """At most ``count`` of the storages; parts between them have ``count + 1``, ``count``, ..., 1 shares of bytes."""
    ends = [*accumulate(range(count + 1, 0, -1))]
    return _at(flow, separating, [end / ends[-1] for end in ends[:-1]])


def _at(flow: Dataflow, separating: Sequence[int], shares: Iterable[float]) -> frozenset[int]:
    """The storages nearest to where these shares of the forward's bytes are written."""
    forward = flow.operations[: flow.forward]
    written = [sum(flow.sizes_bytes[storage] for storage in operation.writes) for operation in forward]
    before = list(accumulate(written, initial=0))
    marks = [before[flow.writer[storage] + 1] for storage in separating]
    return frozenset(separating[_nearest(marks, before[-1] * share)] for share in shares if marks)


def least_peak(flow: Dataflow, choices: Iterable[Set[int]]) -> frozenset[int]:
    """The kept set whose schedule has the least peak; of equal ones, the one that recomputes for the least time."""
    return min(map(frozenset, choices), key=lambda kept: _peak_and_seconds(flow, kept))


def _peak_and_seconds(flow: Dataflow, kept: Set[int]) -> tuple[int, float]:
    schedule = late(flow, kept)
    return simulate(flow, schedule).peak_bytes, sum(flow.operations[index].repeat.seconds for index in schedule)


def _nearest(ascending: Sequence[float], target: float) -> int:
    """The place of the value nearest to ``target``, the first of equally near ones."""
    after = bisect_left(ascending, target)
    near = (place for place in (after - 1, after) if 0 <= place < len(ascending))
    return min(near, key=lambda place: abs(ascending[place] - target))
