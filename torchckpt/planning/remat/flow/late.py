"""Late recomputation: a set of storages to keep, lowered to a schedule."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from torchckpt.planning.remat.flow.dataflow import Dataflow, Schedule

__all__ = ["Home", "Region", "late", "separating_storages", "separators"]

Region = tuple[str, ...]
"""The names of regions, each inside the one before; empty outside of all."""


class Home(NamedTuple):
    """For a dropped storage: the region in which it is made, and the enclosing region that reads it, else the same."""

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
    there = {storage for index in schedule for storage in flow.operations[index].writes if storage in stays}
    there |= flow.given
    nest = _Nest(flow, homes or {}, regions, stays)
    for index in range(flow.forward, len(flow.operations)):
        there -= nest.gone(index)
        again = _missing(flow, index, there, nest)
        schedule += [*again, index]
        there |= nest.stay(index, (storage for repeat in again for storage in flow.operations[repeat].repeat.writes))
        there.update(flow.operations[index].writes)
    return schedule


class _Nest:
    """Tracks which recomputed storages are alive, and for which region."""

    def __init__(
        self, flow: Dataflow, homes: Mapping[int, Home], regions: Sequence[Region], stays: Set[int]
    ) -> None:
        self._homes, self._held = homes, dict[int, Region]()
        self._spans = _spans(regions, range(flow.forward, len(flow.operations)))
        wanted = _needed(flow, stays) if homes else set()
        self._leaving: dict[Region, list[int]] = {}
        for storage, (inside, around) in homes.items():
            if inside != around and storage in wanted:
                self._leaving.setdefault(inside, []).append(storage)

    def gone(self, index: int) -> set[int]:
        """The storages that die before the operation at ``index``."""
        found = {storage for storage, region in self._held.items() if self._ends(storage, region, index)}
        self._held = {storage: region for storage, region in self._held.items() if storage not in found}
        return found

    def stay(self, index: int, back: Iterable[int]) -> set[int]:
        """The storages of ``back``, recomputed for the operation at ``index``, that stay alive after it."""
        found = set()
        for storage in back:
            inside, around = self._homes.get(storage, ((), ()))
            region = inside if self._is_in(inside, index) or inside == around else around
            if self._is_in(region, index) or (region != inside and self._is_ahead(region, index)):
                found.add(storage)
                if inside:
                    self._held[storage] = region
        return found

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
    found: dict[Region, tuple[int, int]] = {}
    for index in indices if regions else ():
        for depth in range(1, len(regions[index]) + 1):
            region = regions[index][:depth]
            found[region] = found.get(region, (index, index))[0], index
    return found


def _needed(flow: Dataflow, stays: Set[int]) -> set[int]:
    """The storages that the backward has to recompute: those that it reads, and those that their repeats read."""
    wanted = [storage for operation in flow.operations[flow.forward :] for storage in operation.reads]
    found = set[int]()
    while wanted:
        storage = wanted.pop()
        if storage not in stays and storage not in found and flow.writer[storage] < flow.forward:
            found.add(storage)
            wanted.extend(flow.operations[flow.writer[storage]].repeat.reads)
    return found


def _missing(flow: Dataflow, index: int, there: Set[int], nest: _Nest) -> list[int]:
    """The operations to repeat before ``index`` can run, in the order of the forward."""
    wanted, found = list(flow.operations[index].reads), set()
    while wanted:
        storage = wanted.pop()
        if storage not in there and (writer := flow.writer[storage]) not in found:
            found.add(writer)
            wanted.extend(flow.operations[writer].repeat.reads)
            wanted.extend(nest.beside(storage, index))
    return sorted(found)


def separators(reads: Sequence[Sequence[int]]) -> list[int]:
    """The nodes of a graph that no edge jumps over, in ascending order.

    Without such a node, no node after it can be reached from a node before it. The first node and the last one always
    separate. Takes one sweep over nodes and edges.

    Args:
        reads: for each node, the nodes that it reads. Nodes are in a topological order.

    Example:
        In a chain of five with a skip from 1 to 3, all but 2 separate:

        >>> separators([[], [0], [1], [1, 2], [3]])
        [0, 1, 3, 4]
    """
    last_reader = list(range(len(reads)))
    for node, before in enumerate(reads):
        for read in before:
            last_reader[read] = node
    found, reached = [], -1
    for node, last in enumerate(last_reader):
        if reached <= node:
            found.append(node)
        reached = max(reached, last)
    return found


def separating_storages(flow: Dataflow, there: Set[int] = frozenset()) -> list[int]:
    """The storages that each cut the forward in two, in the order in which they are written.

    The operations after a separating storage read nothing that was written before it. Given storages are an exception:
    parameters, and inputs of the step, may be read anywhere. A storage that no later operation of the forward reads
    separates nothing.

    This is the criterion of the 'memory' policy of TensorFlow's memory-saving gradients (Salimans and Bulatov, 2018).
    That policy removes every value in turn and looks for connected components; one sweep finds the same values.

    Args:
        there: other storages that may be read anywhere, since they are always kept, such as a small attention mask
            that every layer reads.
    """
    known = flow.given | there
    operations = flow.operations[: flow.forward]
    reads = [[storage for storage in operation.reads if storage not in known] for operation in operations]
    read = {storage for storages in reads for storage in storages}
    nodes = separators([[flow.writer[storage] for storage in storages] for storages in reads])
    outputs = ([storage for storage in operations[node].writes if storage in read] for node in nodes)
    return [storages[0] for storages in outputs if len(storages) == 1]
