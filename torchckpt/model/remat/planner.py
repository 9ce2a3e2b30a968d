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
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from torchckpt.model.remat.dataflow import Dataflow, Schedule
from torchckpt.model.remat.eviction import Eviction, Taste
from torchckpt.model.remat.improve import prune, stages_of
from torchckpt.model.remat.late import late
from torchckpt.model.remat.memory import Memory, lower_bound_bytes, simulate
from torchckpt.model.remat.order import hoisted, moved, transplanted
from torchckpt.model.remat.ruin import Ruin
from torchckpt.model.remat.select import evenly
from torchckpt.model.remat.separators import separating_storages
from torchckpt.model.remat.shortest import Shortest
from torchckpt.model.remat.stages import Stages
from torchckpt.model.remat.tables import Tables

__all__ = ["Solution", "fit", "least", "solution"]

_TASTES = tuple(Taste(size, length) for size in (1.0, 0.5) for length in (0.5, 0.0, 1.0))
_TINY, _SMALL = 16, 200
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
        found = _search(flow, middle, pinned, thorough=False)
        if found.peak_bytes < best.peak_bytes:
            best = found
        if found.peak_bytes > middle:
            low = middle + 1
    return min(best, _search(flow, best.peak_bytes, pinned), key=lambda one: (one.peak_bytes, one.seconds))


def _search(flow: Dataflow, budget_bytes: int, pinned: Set[int], thorough: bool = True) -> Solution:
    tables = Tables(flow, pinned)

    def key(stages: Stages) -> tuple[int, float]:
        return max(stages.peak_bytes, budget_bytes), stages.cost

    best = min(_candidates(tables, budget_bytes, pinned, _TASTES if thorough else _TASTES[:2]), key=key)
    if tables.count <= _TINY:
        most = best.cost if best.peak_bytes <= budget_bytes else math.inf
        shortest = Shortest(tables, budget_bytes, most, _TINY_STATES).run()
        if shortest or most < math.inf:
            return solution(flow, shortest or best.schedule())
    if tables.count <= _LARGE:
        best = min([best, *_reordered(best, budget_bytes, pinned)], key=key)
        if thorough and best.peak_bytes <= budget_bytes:
            return solution(flow, _searched(best, budget_bytes, pinned))
    return solution(flow, best.schedule())


def _candidates(
    tables: Tables, budget_bytes: int, pinned: Set[int], tastes: Sequence[Taste] = _TASTES
) -> Iterator[Stages]:
    flow = tables.flow
    for taste in tastes if tables.count <= _LARGE else tastes[:2]:
        yield _evicted(Stages(tables), budget_bytes, taste)
    if tables.count > _LARGE:
        return
    separating = separating_storages(flow)
    counts = {round(math.sqrt(len(separating)) * share) for share in (0.5, 0.7, 1, 1.4, 2, 2.8, 4)} - {0}
    for count in sorted(counts):
        kept = evenly(flow, separating, count) | pinned
        yield _evicted(stages_of(flow, late(flow, kept), pinned), budget_bytes)


def _reordered(best: Stages, budget_bytes: int, pinned: Set[int]) -> Iterator[Stages]:
    """The best so far, and evictions from scratch, in other orders of the first runs."""
    flow = best.tables.flow
    for sink in (False, True):
        order = hoisted(flow, sink)
        if order != best.tables.order:
            tables = Tables(flow, pinned, order)
            yield _evicted(transplanted(best, order, tables), budget_bytes)
            for taste in _TASTES[:2]:
                yield _evicted(Stages(tables), budget_bytes, taste)


def _searched(best: Stages, budget_bytes: int, pinned: Set[int]) -> Schedule:
    """Local search, in turns over the repeats and over the order of the first runs."""
    flow, work = best.tables.flow, _SEARCH_WORK // max(best.tables.count, 150)
    for turn in range(2):
        ruin = Ruin(best, budget_bytes, turn)
        ruin.run(work // 2)
        best = stages_of(flow, ruin.best, pinned)
        if best.tables.count <= _SMALL:
            best = _rearranged(best, budget_bytes, pinned)
    return best.schedule()


def _rearranged(best: Stages, budget_bytes: int, pinned: Set[int]) -> Stages:
    """One first run earlier or later, where that makes room to do without a repeat."""
    flow = best.tables.flow
    for order in moved(flow, best.tables.order):
        if sorted(order) == sorted(best.tables.order):
            other = transplanted(best, order, Tables(flow, pinned, order))
            if other.peak_bytes <= budget_bytes:
                prune(other, budget_bytes)
                if other.cost < best.cost:
                    best = other
    return best


def _evicted(stages: Stages, budget_bytes: int, taste: Taste = _TASTES[0]) -> Stages:
    Eviction(stages, budget_bytes, taste).run()
    prune(stages, max(budget_bytes, stages.peak_bytes))
    return stages
