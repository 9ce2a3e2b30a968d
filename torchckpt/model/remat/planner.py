"""Planner: the fastest schedule under a byte budget."""
from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from torchckpt.model.remat.dataflow import Dataflow, Schedule
from torchckpt.model.remat.eviction import Eviction, Taste
from torchckpt.model.remat.improve import prune
from torchckpt.model.remat.memory import Memory, lower_bound_bytes, simulate
from torchckpt.model.remat.stages import Stages
from torchckpt.model.remat.tables import Tables

__all__ = ["Solution", "fit", "least"]


@dataclass(frozen=True)
class Solution:
    """A schedule, what :func:`simulate` says of it, and the seconds of all its runs, repeats included."""

    schedule: tuple[int, ...]
    memory: Memory
    seconds: float

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes


def solution(flow: Dataflow, schedule: Schedule) -> Solution:
    seen: set[int] = set()
    seconds = 0.0
    for index in schedule:
        operation = flow.operations[index]
        seconds += (operation.repeat if index in seen else operation).seconds
        seen.add(index)
    return Solution(tuple(schedule), simulate(flow, schedule), seconds)


TASTES = tuple(Taste(size, length) for size in (1.0, 0.5) for length in (0.5, 0.0, 1.0))


def fit(flow: Dataflow, budget_bytes: int, pinned: Set[int] = frozenset()) -> Solution:
    """The fastest schedule found within the budget; if there is none, the one of least peak."""
    tables = Tables(flow, pinned)
    tried = [_evicted(tables, budget_bytes, taste) for taste in TASTES]
    best = min(tried, key=lambda stages: (max(stages.peak_bytes, budget_bytes), stages.cost))
    return solution(flow, best.schedule())


def _evicted(tables: Tables, budget_bytes: int, taste: Taste) -> Stages:
    stages = Stages(tables)
    Eviction(stages, budget_bytes, taste).run()
    prune(stages, max(budget_bytes, stages.peak_bytes))
    return stages


def least(flow: Dataflow, pinned: Set[int] = frozenset()) -> Solution:
    """The least peak found."""
    low, best = lower_bound_bytes(flow), solution(flow, flow.eager)
    while low < best.peak_bytes * 0.999:
        middle = (low + best.peak_bytes) // 2
        found = fit(flow, middle, pinned)
        if found.peak_bytes < best.peak_bytes:
            best = found
        if found.peak_bytes > middle:
            low = middle + 1
    return best
