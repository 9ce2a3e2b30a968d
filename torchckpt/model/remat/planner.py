"""Planner: the fastest schedule under a byte budget.

The problem is NP-hard, and an integer programme of it (Checkmate) is too large to solve at some hundred operations. So:

    eviction        a sweep that drops, where memory is over the budget, what is cheapest for its bytes to bring back;
                    several tastes, also on top of evenly kept separators (Chen et al.)
    prune           repeats that the memory has room to do without
    ruin            and recreate: a local search from the best of these
    shortest        instead of that, Dijkstra's algorithm, exact, for a dozen operations

Every one of them sees the memory exactly as :func:`~torchckpt.model.remat.memory.simulate` counts it. The effort is
counted in work, by size, and not in seconds: the same dataflow gets the same schedule everywhere.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass

from torchckpt.model.remat.dataflow import Dataflow, Schedule
from torchckpt.model.remat.eviction import Eviction, Taste
from torchckpt.model.remat.improve import prune, stages_of
from torchckpt.model.remat.late import late
from torchckpt.model.remat.memory import Memory, lower_bound_bytes, simulate
from torchckpt.model.remat.ruin import Ruin
from torchckpt.model.remat.select import evenly
from torchckpt.model.remat.separators import separating_storages
from torchckpt.model.remat.shortest import Shortest
from torchckpt.model.remat.stages import Stages
from torchckpt.model.remat.tables import Tables

__all__ = ["Solution", "fit", "least", "solution"]

_TASTES = tuple(Taste(size, length) for size in (1.0, 0.5) for length in (0.5, 0.0, 1.0))
_TINY = 12
_TINY_STATES = 6000
_LARGE = 10_000
"""Operations beyond which only the first two tastes are tried, and nothing after them."""
_SEARCH_WORK = 12_000_000
"""Of the local search, per operation: a change of a larger schedule takes longer."""


@dataclass(frozen=True)
class Solution:
    """A schedule, what :func:`simulate` says of it, and the seconds of all its runs, repeats included."""

    schedule: tuple[int, ...]
    memory: Memory
    seconds: float

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes


def fit(flow: Dataflow, budget_bytes: int, pinned: Set[int] = frozenset()) -> Solution:
    """The fastest schedule found whose peak is at most ``budget_bytes``; if none was, the one of least peak.

    Args:
        pinned: storages that no repeat may write. An operation that writes one of them runs once.

    Example:
        >>> from torchckpt.model.remat.dataflow import Dataflow, Operation
        >>> forward = Operation("a", (0,), (1,), 1.0), Operation("b", (1,), (2,), 1.0)
        >>> backward = Operation("db", (1, 2), (3,), 1.0), Operation("da", (0, 1, 3), (4,), 1.0)
        >>> flow = Dataflow((*forward, *backward), (9, 4, 9, 2, 2), 2, frozenset({0}), frozenset({4}))
        >>> fit(flow, 15).schedule, fit(flow, 15).peak_bytes
        ((0, 1, 2, 3), 15)
    """
    eager = solution(flow, flow.eager)
    if eager.peak_bytes <= budget_bytes:
        return eager
    found = _search(flow, budget_bytes, pinned)
    return found if found.peak_bytes <= budget_bytes else _lowest(flow, budget_bytes + 1, found, pinned)


def least(flow: Dataflow, pinned: Set[int] = frozenset()) -> Solution:
    """The schedule of the least peak found."""
    return _lowest(flow, lower_bound_bytes(flow), solution(flow, flow.eager), pinned)


def solution(flow: Dataflow, schedule: Schedule) -> Solution:
    """``schedule``, simulated and timed."""
    seen: set[int] = set()
    seconds = 0.0
    for index in schedule:
        operation = flow.operations[index]
        seconds += (operation.repeat if index in seen else operation).seconds
        seen.add(index)
    return Solution(tuple(schedule), simulate(flow, schedule), seconds)


def _lowest(flow: Dataflow, low: int, best: Solution, pinned: Set[int]) -> Solution:
    """Bisect the budgets from ``low`` to the peak of ``best``."""
    while low < best.peak_bytes * 0.995:
        middle = (low + best.peak_bytes) // 2
        found = _search(flow, middle, pinned)
        if found.peak_bytes < best.peak_bytes:
            best = found
        if found.peak_bytes > middle:
            low = middle + 1
    return best


def _search(flow: Dataflow, budget_bytes: int, pinned: Set[int]) -> Solution:
    tables = Tables(flow, pinned)
    found = list(_candidates(tables, budget_bytes, pinned))
    best = min(found, key=lambda stages: (max(stages.peak_bytes, budget_bytes), stages.cost))
    schedule, cost = best.schedule(), best.cost if best.peak_bytes <= budget_bytes else math.inf
    if tables.count <= _TINY:
        shortest = Shortest(tables, budget_bytes, cost, _TINY_STATES).run()
        return solution(flow, shortest or schedule)
    if cost < math.inf and tables.count <= _LARGE:
        ruin = Ruin(best, budget_bytes)
        ruin.run(_SEARCH_WORK // max(tables.count, 150))
        schedule = ruin.best
    return solution(flow, schedule)


def _candidates(tables: Tables, budget_bytes: int, pinned: Set[int]) -> Iterator[Stages]:
    flow = tables.flow
    for taste in _TASTES if tables.count <= _LARGE else _TASTES[:2]:
        yield _evicted(Stages(tables), budget_bytes, taste)
    if tables.count > _LARGE:
        return
    separating = separating_storages(flow)
    counts = {round(math.sqrt(len(separating)) * share) for share in (0.5, 0.7, 1, 1.4, 2, 2.8, 4)} - {0}
    for count in sorted(counts):
        kept = evenly(flow, separating, count) | pinned
        yield _evicted(stages_of(flow, late(flow, kept), pinned), budget_bytes, _TASTES[0])


def _evicted(stages: Stages, budget_bytes: int, taste: Taste) -> Stages:
    Eviction(stages, budget_bytes, taste).run()
    prune(stages, max(budget_bytes, stages.peak_bytes))
    return stages
