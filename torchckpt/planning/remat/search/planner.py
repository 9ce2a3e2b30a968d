"""Planner: the fastest schedule under a byte budget.

The problem is NP-hard. An integer programme of it (Checkmate) is too large to solve for hundreds of operations. So:

    eviction        drops storages where memory is over the budget, those cheapest to recompute per byte first; with
                    several scores, also from schedules that keep evenly spaced separators (Chen et al.)
    prune           removes repeats whose storages fit
    ruin            "ruin and recreate": a local search from the best schedules found
    shortest        exact, for a dozen operations, in place of the local search: Dijkstra's algorithm

All of them count memory exactly as :func:`~torchckpt.planning.remat.flow.memory.simulate` does. Counted work limits the
effort, and not time: the same dataflow gets the same schedule on every machine.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from torchckpt.planning.remat.flow.dataflow import Dataflow, Schedule, Tables, runs
from torchckpt.planning.remat.flow.incremental import Draft
from torchckpt.planning.remat.flow.late import evenly, late, separating_storages
from torchckpt.planning.remat.flow.memory import lower_bound_bytes, simulate
from torchckpt.planning.remat.search.eviction import Eviction, EvictionScore
from torchckpt.planning.remat.search.improve import RuinAndRecreate, draft_of, hoisted, moved, prune, transplanted
from torchckpt.planning.remat.search.shortest import Shortest

__all__ = ["Solution", "fit", "frontier", "least", "solution"]

_SCORINGS = (
    EvictionScore(1.0, 0.5, gradients=False),
    EvictionScore(1.0, 0.5, put_off=50.0),
    EvictionScore(1.0, 0.0),
    EvictionScore(1.0, 1.0, put_off=8.0),
    EvictionScore(0.5, 0.5, put_off=50.0, gradients=False),
    EvictionScore(0.5, 0.0, put_off=50.0),
    EvictionScore(0.5, 1.0),
)
_TINY, _SMALL = 16, 200
_TINY_STATES = 6000
_MEDIUM, _LARGE = 300, 10_000
"""Beyond so many operations less is tried: beyond ``_LARGE``, three evictions and no local search."""
_STARTS = 3
"""Schedules that the local search starts from; it ends with the best of them."""
_SEARCH_WORK = 20_000_000
"""The work of the local search, divided by the number of operations: a change of a larger schedule takes longer."""


class Solution(NamedTuple):
    """A schedule, its peak as :func:`simulate` counts it, and the seconds of all its runs, repeats included."""

    schedule: tuple[int, ...]
    peak_bytes: int
    seconds: float


def _silent(_: str) -> None:
    """A ``tell`` that ignores progress texts."""


def fit(
    flow: Dataflow, budget_bytes: int, pinned: Set[int] = frozenset(), tell: Callable[[str], None] = _silent
) -> Solution:
    """The fastest schedule found whose peak is at most ``budget_bytes``. If none fits, the one of the least peak found.

    A second call with that least peak as its budget finds a schedule that fits.

    Args:
        pinned: storages that no repeat may write. An operation that writes one of them runs once. Default: none.
        tell: called now and then with a progress text. Default: no progress is shown.

    Example:
        >>> from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation
        >>> forward = Operation("a", (0,), (1,), 1.0), Operation("b", (1,), (2,), 1.0)
        >>> backward = Operation("db", (1, 2), (3,), 1.0), Operation("da", (0, 1, 3), (4,), 1.0)
        >>> flow = Dataflow((*forward, *backward), (9, 4, 9, 2, 2), 2, frozenset({0}), frozenset({4}))
        >>> fit(flow, 15).schedule, fit(flow, 15).peak_bytes
        ((0, 1, 2, 3), 15)
    """
    eager = solution(flow, flow.eager)
    if eager.peak_bytes <= budget_bytes:
        return eager
    best = _search(flow, budget_bytes, pinned, tell)
    return best if best.peak_bytes <= budget_bytes else _lowest(flow, best, pinned, tell)


def _lowest(flow: Dataflow, best: Solution, pinned: Set[int], tell: Callable[[str], None]) -> Solution:
    """A schedule of low peak, to return if none fits the budget. A search with that peak as its budget finds one, too.

    This is not a matter of course: a search may miss a schedule that a search with a smaller budget has found.
    """
    low = _search(flow, lower_bound_bytes(flow), pinned, lambda what: tell(f"least memory, {what}"))
    if low.peak_bytes <= best.peak_bytes:
        return low
    again = _search(flow, best.peak_bytes, pinned, lambda what: tell(f"least memory again, {what}"))
    return best if again.peak_bytes <= best.peak_bytes else low


def least(flow: Dataflow, pinned: Set[int] = frozenset()) -> Solution:
    """The schedule of the least peak found. If several have that peak, the fastest."""
    low, best, key = lower_bound_bytes(flow), solution(flow, flow.eager), attrgetter("peak_bytes", "seconds")
    while low < best.peak_bytes * 0.99:
        middle = (low + best.peak_bytes) // 2
        first = _first(flow, middle, pinned)
        best = min(best, first, key=key)
        if first.peak_bytes > middle:
            low = middle + 1
    best = min(best, _search(flow, int(0.97 * best.peak_bytes), pinned), key=key)
    return min(best, _search(flow, best.peak_bytes, pinned), key=key)


def frontier(
    flow: Dataflow, points: int = 20, pinned: Set[int] = frozenset(), tell: Callable[[str], None] = _silent
) -> list[Solution]:
    """Solutions at up to ``points`` evenly spaced budgets: peaks strictly decreasing, seconds strictly increasing.

    Each budget is also searched from the solution of its neighbour, first downwards, then upwards.

    Args:
        points: the most solutions, the two ends included. Default: 20.
        pinned: storages that no repeat may write. Default: none.
        tell: called with a progress text. Default: no progress is shown.
    """
    tell("least memory")
    eager, smallest = solution(flow, flow.eager), least(flow, pinned)
    span = eager.peak_bytes - smallest.peak_bytes
    budgets = [eager.peak_bytes - span * point // max(1, points - 1) for point in range(1, points - 1)]
    down, up = [eager], [smallest]
    for number, budget in enumerate(budgets, start=1):
        tell(f"budget {number} of {2 * len(budgets)}")
        down.append(_near(flow, budget, down[-1], pinned))
    for number, (budget, before) in enumerate(zip(reversed(budgets), reversed(down)), start=len(budgets) + 1):
        tell(f"budget {number} of {2 * len(budgets)}")
        more = _near(flow, budget, up[-1], pinned)
        up.append(min(before, more, key=lambda point: (max(point.peak_bytes, budget), point.seconds)))
    return _undominated([eager, *up])


def _undominated(solutions: list[Solution]) -> list[Solution]:
    """The solutions that no other solution beats in both peak and seconds, by falling peak."""
    best: list[Solution] = []
    for point in sorted(solutions, key=attrgetter("seconds", "peak_bytes")):
        if not best or (point.peak_bytes < best[-1].peak_bytes and point.seconds > best[-1].seconds):
            best.append(point)
    return best


def solution(flow: Dataflow, schedule: Schedule) -> Solution:
    """``schedule``, simulated and timed."""
    seconds = sum(operation.seconds for operation in runs(flow, schedule))
    return Solution(tuple(schedule), simulate(flow, schedule).peak_bytes, seconds)


def _first(flow: Dataflow, budget_bytes: int, pinned: Set[int]) -> Solution:
    """The first schedule found that fits. If there is none, the one of least peak."""
    tables, tried = Tables(flow, pinned), []
    for draft in chain(
        _candidates(tables, budget_bytes, pinned, _SCORINGS[:2], (1.0, 2.0)),
        (_evicted(Draft(Tables(flow, pinned, hoisted(flow, sink))), budget_bytes) for sink in (False, True)),
    ):
        tried.append(draft)
        if draft.peak_bytes <= budget_bytes:
            return solution(flow, draft.schedule())
    if tables.count <= _TINY:
        shortest = Shortest(tables, budget_bytes, math.inf, _TINY_STATES).run()
        if shortest:
            return solution(flow, shortest)
    return solution(flow, min(tried, key=lambda draft: draft.peak_bytes).schedule())


def _told(drafts: Iterable[Draft], what: str, tell: Callable[[str], None]) -> Iterator[Draft]:
    for number, draft in enumerate(drafts, start=1):
        tell(f"{what} {number}")
        yield draft


def _search(flow: Dataflow, budget_bytes: int, pinned: Set[int], tell: Callable[[str], None] = _silent) -> Solution:
    tables, key = Tables(flow, pinned), _key_within(budget_bytes)
    drafts = sorted(_told(_candidates(tables, budget_bytes, pinned), "eviction", tell), key=key)
    best = drafts[0]
    if tables.count <= _TINY:
        most = best.cost if best.peak_bytes <= budget_bytes else math.inf
        shortest = Shortest(tables, budget_bytes, most, _TINY_STATES).run()
        if shortest or most < math.inf:
            return solution(flow, shortest or best.schedule())
    if tables.count > _LARGE:
        return solution(flow, best.schedule())
    drafts = sorted([*drafts, *_told(_reordered(best, budget_bytes, pinned), "order", tell)], key=key)
    work = _SEARCH_WORK // max(tables.count, 150)
    for draft in _told(drafts[:_STARTS], f"search, of {_STARTS + 1} number", tell):
        RuinAndRecreate(draft, budget_bytes).run(work // _STARTS // 2)
    best = min(drafts[:_STARTS], key=key)
    tell(f"search, of {_STARTS + 1} number {_STARTS + 1}")
    return solution(flow, _searched(best, budget_bytes, pinned, work // 2))


def _near(flow: Dataflow, budget_bytes: int, start: Solution, pinned: Set[int]) -> Solution:
    """The result of :func:`fit` with less effort, but also from ``start``, the solution for a similar budget."""
    started = _evicted(draft_of(flow, start.schedule, pinned), budget_bytes)
    drafts = [started, *_candidates(Tables(flow, pinned), budget_bytes, pinned, _SCORINGS[:2])]
    best, count = min(drafts, key=_key_within(budget_bytes)), len(flow.operations)
    if count <= _LARGE:
        RuinAndRecreate(best, budget_bytes).run(_SEARCH_WORK // max(count, 150) // 4)
    return solution(flow, best.schedule())


def _key_within(budget_bytes: int) -> Callable[[Draft], tuple[int, float]]:
    """A key by which drafts that fit come first, the fastest before the others; then those of low peaks."""
    return lambda draft: (max(draft.peak_bytes, budget_bytes), draft.cost)


def _candidates(
    tables: Tables, budget_bytes: int, pinned: Set[int], scorings: Sequence[EvictionScore] = _SCORINGS,
    shares: Sequence[float] = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0),
) -> Iterator[Draft]:
    """Schedules by eviction: from the eager one, and from some that keep separating storages.

    Of n separating storages, they keep about sqrt(n) times each of ``shares``.
    """
    flow = tables.flow
    if tables.count > _MEDIUM:
        scorings, shares = scorings[:4] if tables.count <= _LARGE else scorings[:2], shares[-2:-1]
    for scoring in scorings:
        yield _evicted(Draft(tables), budget_bytes, scoring)
    separating = separating_storages(flow)
    counts = {round(math.sqrt(len(separating)) * share) for share in shares} - {0}
    for count in sorted(counts):
        kept = evenly(flow, separating, count) | pinned
        yield _evicted(draft_of(flow, late(flow, kept), pinned), budget_bytes)


def _reordered(best: Draft, budget_bytes: int, pinned: Set[int]) -> Iterator[Draft]:
    """Schedules with other orders of the first runs: the repeats of ``best`` in that order, and evictions from none."""
    flow = best.tables.flow
    for sink in (False, True):
        order = hoisted(flow, sink)
        if order != best.tables.order:
            tables = Tables(flow, pinned, order)
            yield _evicted(transplanted(best, tables), budget_bytes)
            for scoring in _SCORINGS[:2]:
                yield _evicted(Draft(tables), budget_bytes, scoring)


def _searched(best: Draft, budget_bytes: int, pinned: Set[int], work: int) -> Schedule:
    """The result of a local search in turns: over the order of the first runs, and over the repeats."""
    for turn in (1, 2):
        if best.tables.count <= _SMALL and best.peak_bytes <= budget_bytes:
            best = _rearranged(best, budget_bytes, pinned)
        RuinAndRecreate(best, budget_bytes, turn).run(work // 2)
    return best.schedule()


def _rearranged(best: Draft, budget_bytes: int, pinned: Set[int]) -> Draft:
    """``best`` with first runs moved earlier or later, where this makes a repeat unnecessary."""
    flow = best.tables.flow
    for order in moved(flow, best.tables.order):
        other = transplanted(best, Tables(flow, pinned, order))
        if other.peak_bytes <= budget_bytes:
            prune(other, budget_bytes)
            if other.cost < best.cost:
                best = other
    return best


def _evicted(draft: Draft, budget_bytes: int, scoring: EvictionScore = _SCORINGS[0]) -> Draft:
    Eviction(draft, budget_bytes, scoring).run()
    prune(draft, max(budget_bytes, draft.peak_bytes))
    return draft
