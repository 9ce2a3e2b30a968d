"""Late recomputation: a set of storages to keep, lowered to a schedule."""
from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from torchckpt.model.remat.dataflow import Dataflow, Schedule

__all__ = ["late"]


def late(
    flow: Dataflow, kept: Set[int], depths: Mapping[int, int] | None = None, levels: Sequence[int] = ()
) -> Schedule:
    """Drop what is not in ``kept`` after its last use in the forward; bring it back right before its first use after.

    Only what an operation of the backward needs is brought back, each operation at most once, in the order of the
    forward. Hoisted to the start of the backward, the same set would be alive all at once, and nothing saved. Results,
    and what no repeat writes, are kept in any case.

    Args:
        depths: of storages that are dropped, how many regions deep they are, where that is more than one.
        levels: of each operation, how many regions deep it is. After one of the backward, what is deeper than it is
            dropped again, so that an operation ``d`` regions deep runs ``d + 1`` times (Griewank 1992). Default: none
            is in a region.
    """
    depths = depths or {}
    stays = flow.given | flow.results | (kept | (frozenset(flow.writer) - flow.recoverable))
    schedule = list(range(flow.forward))
    there = {storage for index in schedule for storage in flow.operations[index].writes if storage in stays}
    there |= flow.given
    for index in range(flow.forward, len(flow.operations)):
        again = _missing(flow, index, there)
        schedule += [*again, index]
        back = {storage for repeat in again for storage in flow.operations[repeat].repeat.writes}
        level = max(1, levels[index]) if levels else 1
        there -= {storage for storage, depth in depths.items() if depth > level and storage not in stays}
        there.update(storage for storage in back if depths.get(storage, 1) <= level)
        there.update(flow.operations[index].writes)
    return schedule


def _missing(flow: Dataflow, index: int, there: Set[int]) -> list[int]:
    """The operations to repeat before ``index`` can run, in the order of the forward."""
    wanted, found = list(flow.operations[index].reads), set()
    while wanted:
        storage = wanted.pop()
        if storage not in there and (writer := flow.writer[storage]) not in found:
            found.add(writer)
            wanted.extend(flow.operations[writer].repeat.reads)
    return sorted(found)
