"""Late recomputation: a set of storages to keep, chosen by a classical rule, and lowered to a schedule."""
from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import accumulate
from typing import NamedTuple

from torchckpt.planning.remat.flow.dataflow import Dataflow, Schedule
from torchckpt.planning.remat.flow.memory import simulate

__all__ = [
    "Home", "Region", "evenly", "every_sqrt", "falling", "late", "least_peak", "separating_storages", "separators",
]

_SHARES = (0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0)
"""The counts that are tried, as multiples of the square root: sizes of gradients and workspaces move the best one."""

Region = tuple[str, ...]
"""The names of regions, each inside the one before; empty outside of all."""


class Home(NamedTuple):
    """The region in which a dropped storage is made, and the enclosing region that reads it, else the same."""

    inside: Region
    around: Region


def late(
    flow: Dataflow, kept: Set[int], homes: Mapping[int, Home] | None = None, regions: Sequence[Region] = ()
) -> Schedule:
    """The schedule that drops all storages but ``kept`` in the forward, and recomputes each right before its first use.

    The backward repeats only operations that it needs, each at most once, in the order of the forward. Repeats at the
    start of the backward would save nothing: all storages would be alive at once. Results, and storages that no repeat
    writes, are always kept.

    Args:
        homes: the regions of storages that are dropped more than one region deep. A storage that is recomputed for a
            region dies after the last operation of the backward in it. It dies earlier, before the first operation in
            the inner region that makes it, for that region recomputes it again. All storages that leave a region are
            recomputed at once. So an operation ``d`` regions deep runs ``d + 1`` times (Griewank 1992). Default: none.
        regions: the regions of each operation. Default: no operation is in one.
    """
    stays = flow.given | flow.results | (kept | (frozenset(flow.writer) - flow.recoverable))
    schedule = list(range(flow.forward))
    written = {storage for index in schedule for storage in flow.operations[index].writes}
    alive = {*flow.given, *(written & stays)}
    nest = _Nest(flow, homes or {}, regions, stays)
    for index in range(flow.forward, len(flow.operations)):
        alive -= nest.gone(index)
        repeats = _missing(flow, index, alive, nest)
        schedule += [*repeats, index]
        rewritten = (storage for repeated in repeats for storage in flow.operations[repeated].repeat.writes)
        alive.update(nest.stay(index, rewritten), flow.operations[index].writes)
    return schedule


class _Nest:
    """Tracks which recomputed storages are alive, and for which region."""

    def __init__(self, flow: Dataflow, homes: Mapping[int, Home], regions: Sequence[Region], stays: Set[int]) -> None:
        self._homes = homes
        self._alive: dict[int, Region] = {}  # by recomputed storage, the region that it is alive for
        self._spans = _spans(regions, range(flow.forward, len(flow.operations)))
        wanted = _needed(flow, stays) if homes else set()
        self._leaving: dict[Region, list[int]] = {}
        for storage, (inside, around) in homes.items():
            if inside != around and storage in wanted:
                self._leaving.setdefault(inside, []).append(storage)

    def gone(self, index: int) -> set[int]:
        """The storages that die before the operation at ``index``."""
        dying = {storage for storage, region in self._alive.items() if self._ends(storage, region, index)}
        self._alive = {storage: region for storage, region in self._alive.items() if storage not in dying}
        return dying

    def stay(self, index: int, storages: Iterable[int]) -> set[int]:
        """Those of ``storages``, recomputed for the operation at ``index``, that stay alive after it."""
        staying = set()
        for storage in storages:
            inside, around = self._homes.get(storage, ((), ()))
            region = inside if self._is_in(inside, index) or inside == around else around
            if self._is_in(region, index) or (region != inside and self._is_ahead(region, index)):
                staying.add(storage)
                if inside:
                    self._alive[storage] = region
        return staying

    def beside(self, storage: int, index: int) -> Sequence[int]:
        """All storages that leave the region that makes ``storage``; none if the operation at ``index`` is in it."""
        inside, _ = self._homes.get(storage, ((), ()))
        return () if self._is_in(inside, index) else self._leaving.get(inside, ())

    def _ends(self, storage: int, region: Region, index: int) -> bool:
        inside = self._homes[storage].inside
        if region == inside:
            return not self._is_in(inside, index)
        return self._is_in(inside, index) or not (self._is_in(region, index) or self._is_ahead(region, index))

    def _is_ahead(self, region: Region, index: int) -> bool:
        """Whether ``region`` is an outermost one, or none, and has operations of the backward at ``index`` or later."""
        return len(region) <= 1 and (not region or index <= self._spans.get(region, (0, 0))[1])

    def _is_in(self, region: Region, index: int) -> bool:
        first, last = self._spans.get(region, (0, 0))
        return not region or first <= index <= last


def _spans(regions: Sequence[Region], indices: range) -> dict[Region, tuple[int, int]]:
    """For each region, the first and the last of the operations ``indices`` in it."""
    spans: dict[Region, tuple[int, int]] = {}
    for index in indices if regions else ():
        for depth in range(1, len(regions[index]) + 1):
            region = regions[index][:depth]
            spans[region] = spans.get(region, (index, index))[0], index
    return spans


def _needed(flow: Dataflow, stays: Set[int]) -> set[int]:
    """The storages that the backward has to recompute: those that it reads, and those that their repeats read."""
    wanted = [storage for operation in flow.operations[flow.forward :] for storage in operation.reads]
    needed = set[int]()
    while wanted:
        storage = wanted.pop()
        if storage not in stays and storage not in needed and flow.writer[storage] < flow.forward:
            needed.add(storage)
            wanted.extend(flow.operations[flow.writer[storage]].repeat.reads)
    return needed


def _missing(flow: Dataflow, index: int, alive: Set[int], nest: _Nest) -> list[int]:
    """The operations to repeat before ``index`` can run, in the order of the forward."""
    wanted, missing = list(flow.operations[index].reads), set()
    while wanted:
        storage = wanted.pop()
        if storage not in alive and (writer := flow.writer[storage]) not in missing:
            missing.add(writer)
            wanted.extend(flow.operations[writer].repeat.reads)
            wanted.extend(nest.beside(storage, index))
    return sorted(missing)


def separators(reads: Sequence[Sequence[int]]) -> list[int]:
    """The nodes of a graph that no edge jumps over, in ascending order. ``reads``: for each node, the nodes that it
    reads; nodes are in a topological order.

    Without such a node, no node after it can be reached from a node before it. The first node and the last one always
    separate. Takes one sweep over nodes and edges. In a chain of five with a skip from 1 to 3, all but 2 separate:

    >>> separators([[], [0], [1], [1, 2], [3]])
    [0, 1, 3, 4]
    """
    last_reader = list(range(len(reads)))
    for node, before in enumerate(reads):
        for read in before:
            last_reader[read] = node
    separating, reached = [], -1
    for node, last in enumerate(last_reader):
        if reached <= node:
            separating.append(node)
        reached = max(reached, last)
    return separating


def separating_storages(flow: Dataflow, shared: Set[int] = frozenset()) -> list[int]:
    """The storages that each cut the forward in two, in the order in which they are written.

    The operations after a separating storage read nothing that was written before it. Given storages are an exception:
    parameters, and inputs of the step, may be read anywhere. A storage that no later operation of the forward reads
    separates nothing.

    This is the criterion of the 'memory' policy of TensorFlow's memory-saving gradients (Salimans and Bulatov, 2018).
    That policy removes every value in turn and looks for connected components; one sweep finds the same values.
    ``shared``: other storages that may be read anywhere, since they are always kept, such as a small attention mask
    that every layer reads.
    """
    known = flow.given | shared
    operations = flow.operations[: flow.forward]
    reads = [[storage for storage in operation.reads if storage not in known] for operation in operations]
    read = {storage for storages in reads for storage in storages}
    nodes = separators([[flow.writer[storage] for storage in storages] for storages in reads])
    outputs = ([storage for storage in operations[node].writes if storage in read] for node in nodes)
    return [storages[0] for storages in outputs if len(storages) == 1]


def every_sqrt(flow: Dataflow, separating: Sequence[int]) -> frozenset[int]:
    """About sqrt(n) of n separating storages. Empty if there are none.

    This is the 'memory' policy of TensorFlow's memory-saving gradients (Salimans and Bulatov, 2018), after Chen et al.
    (2016). That policy tries one count, with equal bytes of the forward between storages. This one tries several counts
    around sqrt(n), and also gaps that get shorter to the end: the last gap is recomputed first, while all kept storages
    are alive. It takes the set whose schedule needs the least memory. ``separating``: as :func:`separating_storages`
    finds them, in their order.
    """
    counts = sorted({max(1, round(math.sqrt(len(separating)) * share)) for share in _SHARES})
    return least_peak(flow, [way(flow, separating, count) for count in counts for way in (evenly, falling)])


def evenly(flow: Dataflow, separating: Sequence[int], count: int) -> frozenset[int]:
    """At most ``count`` of the storages, those that split the bytes of the forward best into ``count + 1`` parts."""
    return _at(flow, separating, [part / (count + 1) for part in range(1, count + 1)])


def falling(flow: Dataflow, separating: Sequence[int], count: int) -> frozenset[int]:
    """At most ``count`` of the storages; parts between them have ``count + 1``, ``count``, ..., 1 shares of bytes."""
    ends = [*accumulate(range(count + 1, 0, -1))]
    return _at(flow, separating, [end / ends[-1] for end in ends[:-1]])


def least_peak(flow: Dataflow, choices: Iterable[Set[int]]) -> frozenset[int]:
    """The kept set whose schedule has the least peak; of equal ones, the one that recomputes for the least time."""
    def peak_and_seconds(kept: Set[int]) -> tuple[int, float]:
        schedule = late(flow, kept)
        return simulate(flow, schedule).peak_bytes, sum(flow.operations[index].repeat.seconds for index in schedule)

    return min(map(frozenset, choices), key=peak_and_seconds)


def _at(flow: Dataflow, separating: Sequence[int], shares: Iterable[float]) -> frozenset[int]:
    """The storages nearest to where these shares of the forward's bytes are written."""
    forward = flow.operations[: flow.forward]
    ends = list(accumulate(sum(flow.sizes_bytes[storage] for storage in operation.writes) for operation in forward))
    marks = [ends[flow.writer[storage]] for storage in separating]
    return frozenset(separating[_nearest(marks, ends[-1] * share)] for share in shares if marks)


def _nearest(ascending: Sequence[float], target: float) -> int:
    """The place of the value nearest to ``target``, the first of equally near ones."""
    after = bisect_left(ascending, target)
    near = (place for place in (after - 1, after) if 0 <= place < len(ascending))
    return min(near, key=lambda place: abs(ascending[place] - target))
