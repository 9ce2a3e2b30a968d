"""Frontier: the trade-off between seconds and peak bytes, from the eager step down to the least memory found."""
from __future__ import annotations

from collections.abc import Callable, Set

from torchckpt.planning.remat.flow.dataflow import Dataflow
from torchckpt.planning.remat.search.planner import Solution, least, near, silent, solution

__all__ = ["frontier"]


def frontier(
    flow: Dataflow, points: int = 20, pinned: Set[int] = frozenset(), tell: Callable[[str], None] = silent
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
        down.append(near(flow, budget, down[-1], pinned))
    for number, (budget, found) in enumerate(zip(reversed(budgets), reversed(down)), start=len(budgets) + 1):
        tell(f"budget {number} of {2 * len(budgets)}")
        more = near(flow, budget, up[-1], pinned)
        up.append(min(found, more, key=lambda one: (max(one.peak_bytes, budget), one.seconds)))
    return _undominated([eager, *up])


def _undominated(solutions: list[Solution]) -> list[Solution]:
    """The solutions that no other solution beats in both peak and seconds, by falling peak."""
    found: list[Solution] = []
    for one in sorted(solutions, key=lambda one: (one.seconds, one.peak_bytes)):
        if not found or (one.peak_bytes < found[-1].peak_bytes and one.seconds > found[-1].seconds):
            found.append(one)
    return found
