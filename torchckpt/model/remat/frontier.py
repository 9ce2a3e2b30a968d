"""Frontier: what time buys in memory, from the eager step down to the least."""
from __future__ import annotations

from collections.abc import Set

from torchckpt.model.remat.dataflow import Dataflow
from torchckpt.model.remat.planner import Solution, fit, least, solution

__all__ = ["frontier"]


def frontier(flow: Dataflow, points: int = 20, pinned: Set[int] = frozenset()) -> list[Solution]:
    """Solutions at up to ``points`` evenly spaced budgets: peaks strictly decreasing, seconds strictly increasing."""
    eager, smallest = solution(flow, flow.eager), least(flow, pinned)
    span = eager.peak_bytes - smallest.peak_bytes
    budgets = [eager.peak_bytes - span * point // max(1, points - 1) for point in range(1, points - 1)]
    return undominated([eager, *(fit(flow, budget, pinned) for budget in budgets), smallest])


def undominated(solutions: list[Solution]) -> list[Solution]:
    """Those that no other beats in both: by falling peak, the fastest of each."""
    found: list[Solution] = []
    for one in sorted(solutions, key=lambda one: (one.seconds, one.peak_bytes)):
        if not found or one.peak_bytes < found[-1].peak_bytes:
            if found and one.seconds == found[-1].seconds:
                found.pop()
            found.append(one)
    return found
