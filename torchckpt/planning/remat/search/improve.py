"""Improve: remove repeats whose storages the budget has room to keep."""
from __future__ import annotations

from collections.abc import Set

from torchckpt.planning.remat.flow.dataflow import Dataflow, Schedule, Tables
from torchckpt.planning.remat.flow.incremental import Draft
from torchckpt.planning.remat.flow.memory import simulate

__all__ = ["draft_of", "prune", "remove_repeats"]


def remove_repeats(flow: Dataflow, schedule: Schedule, budget_bytes: int) -> Schedule:
    """``schedule`` with as many repeats removed as fits in ``budget_bytes``, the slowest repeats first.

    A schedule over the budget is returned unchanged. The result is at most as slow as ``schedule``, and fits the
    budget if ``schedule`` does.
    """
    draft = draft_of(flow, schedule)
    bare = Draft(draft.tables)
    if bare.peak_bytes <= budget_bytes:
        draft = bare
    if draft.peak_bytes > budget_bytes:
        return schedule
    while prune(draft, budget_bytes):
        pass
    found = draft.schedule()
    return found if len(found) < len(schedule) else schedule


def draft_of(flow: Dataflow, schedule: Schedule, pinned: Set[int] = frozenset()) -> Draft:
    """``schedule`` as a draft: repeats are sorted and distinct at each position, and none writes a pinned storage."""
    simulate(flow, schedule)
    order = list(dict.fromkeys(schedule))
    tables = Tables(flow, pinned, order)
    place = {index: number for number, index in enumerate(order)}
    draft = Draft(tables)
    position = 0
    taken: set[int] = set()
    for index in schedule:
        if position < tables.count and place[index] == position:
            position, taken = position + 1, set()
        elif position < tables.count and place[index] not in taken and tables.may_repeat(place[index], position):
            taken.add(place[index])
            draft.add(position, place[index])
    return draft


def prune(draft: Draft, budget_bytes: int) -> bool:
    """Remove the repeats that the budget has room to do without, the slowest first. True if any was removed."""
    tables, pruned = draft.tables, False
    repeats = sorted(
        ((position, p) for position, repeats in enumerate(draft.repeats) for p in repeats),
        key=lambda repeat: (-tables.repeat_cost[repeat[1]], repeat),
    )
    for position, repeated in repeats:
        if repeated in draft.repeats[position] and _spare(draft, position, repeated, budget_bytes):
            pruned = True
            _sweep_useless(draft, position, repeated)
    return pruned


def _spare(draft: Draft, position: int, repeated: int, budget_bytes: int) -> bool:
    """Remove one repeat if the schedule then still fits the budget; whether it was removed."""
    tables, during = draft.tables, draft.during
    limit = budget_bytes + sum(tables.sizes[s] for s in tables.repeat_reads[repeated] if draft.waits_for(s, position))
    for storage in tables.repeat_writes[repeated]:
        before = draft.before(storage, position)
        if position - before > 1 and draft.alive_after(storage, position) and (
            during.most(before + 1, position) + tables.sizes[storage] > limit
        ):
            return False
    mark = len(draft.log)
    low = draft.remove(position, repeated)
    if during.most(low, position + 1) <= budget_bytes:
        return True
    draft.back(mark)
    return False


def _sweep_useless(draft: Draft, position: int, repeated: int) -> None:
    """Remove the repeats that only this removed repeat needed."""
    tables = draft.tables
    for storage in tables.repeat_reads[repeated]:
        writer = tables.writer[storage]
        birth = draft.before(storage, position + 1)
        if writer in draft.repeats[birth] and draft.useless(birth, writer):
            draft.remove(birth, writer)
            _sweep_useless(draft, birth, writer)
