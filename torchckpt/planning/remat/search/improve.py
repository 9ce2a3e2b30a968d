"""Improve: remove repeats whose storages the budget has room to keep."""
from __future__ import annotations

from collections.abc import Set

from torchckpt.planning.remat.flow.dataflow import Dataflow, Schedule, Tables
from torchckpt.planning.remat.flow.incremental import Stages
from torchckpt.planning.remat.flow.memory import simulate

__all__ = ["prune", "remove_repeats", "stages_of"]


def remove_repeats(flow: Dataflow, schedule: Schedule, budget_bytes: int) -> Schedule:
    """``schedule`` with as many repeats removed as fits in ``budget_bytes``, the slowest repeats first.

    A schedule over the budget is returned unchanged. The result is at most as slow as ``schedule``, and fits the
    budget if ``schedule`` does.
    """
    stages = stages_of(flow, schedule)
    bare = Stages(stages.tables)
    if bare.peak_bytes <= budget_bytes:
        stages = bare
    if stages.peak_bytes > budget_bytes:
        return schedule
    while prune(stages, budget_bytes):
        pass
    found = stages.schedule()
    return found if len(found) < len(schedule) else schedule


def stages_of(flow: Dataflow, schedule: Schedule, pinned: Set[int] = frozenset()) -> Stages:
    """``schedule`` as stages. Each stage has sorted, distinct repeats, and none of them writes a pinned storage."""
    simulate(flow, schedule)
    order = list(dict.fromkeys(schedule))
    tables = Tables(flow, pinned, order)
    position = {index: place for place, index in enumerate(order)}
    stages = Stages(tables)
    stage = 0
    taken: set[int] = set()
    for index in schedule:
        if stage < tables.count and position[index] == stage:
            stage, taken = stage + 1, set()
        elif stage < tables.count and position[index] not in taken and tables.may_repeat(position[index], stage):
            taken.add(position[index])
            stages.add(stage, position[index])
    return stages


def prune(stages: Stages, budget_bytes: int) -> bool:
    """Remove the repeats that the budget has room to do without, the slowest first. True if any was removed."""
    tables, pruned = stages.tables, False
    repeats = sorted(
        ((stage, p) for stage, positions in enumerate(stages.repeats) for p in positions),
        key=lambda repeat: (-tables.repeat_cost[repeat[1]], repeat),
    )
    for stage, position in repeats:
        if position in stages.repeats[stage] and _spare(stages, stage, position, budget_bytes):
            pruned = True
            _sweep_useless(stages, stage, position)
    return pruned


def _spare(stages: Stages, stage: int, position: int, budget_bytes: int) -> bool:
    """Remove one repeat if the schedule then still fits the budget; whether it was removed."""
    tables, during = stages.tables, stages.during
    limit = budget_bytes + sum(tables.sizes[s] for s in tables.repeat_reads[position] if stages.waits_for(s, stage))
    for storage in tables.repeat_writes[position]:
        before = stages.before(storage, stage)
        if stage - before > 1 and stages.alive_after(storage, stage) and (
            during.most(before + 1, stage) + tables.sizes[storage] > limit
        ):
            return False
    mark = len(stages.log)
    low = stages.remove(stage, position)
    if during.most(low, stage + 1) <= budget_bytes:
        return True
    stages.back(mark)
    return False


def _sweep_useless(stages: Stages, stage: int, position: int) -> None:
    """Remove the repeats that only this removed repeat needed."""
    tables = stages.tables
    for storage in tables.repeat_reads[position]:
        writer = tables.writer[storage]
        birth = stages.before(storage, stage + 1)
        if writer in stages.repeats[birth] and stages.useless(birth, writer):
            stages.remove(birth, writer)
            _sweep_useless(stages, birth, writer)
