"""Balance: move blocks between stages, so that the step is shorter under the same budget.

The bound is close to the best plan and much cheaper to compute. So blocks are moved, one at a time, as long as the
bound falls. Then the last few partitions are planned, and the best plan is returned. Blocks stay in their order, and
parameters move along with their blocks. The ``before`` and ``after`` of a stage do not move.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchckpt.planning.plan.problem import Problem
from torchckpt.planning.plan.result import PipelinePlan
from torchckpt.planning.plan.solve import planned

__all__ = ["planned_with_moves"]

_PLANNED = 3
"""The number of partitions that are planned: those with the lowest bounds."""
_WORK = 200_000
"""The actions to bound in all: each bound of a partition takes all actions of its schedule."""
_ROUNDING = 1e-9


def planned_with_moves(problem: Problem) -> PipelinePlan:
    """The best plan of ``problem``, with blocks moved between its stages or not."""
    path = _path(problem)
    plans = [planned(one) for one in dict.fromkeys([*path[-_PLANNED:], path[0]]) if not one.too_small]
    if not plans:
        return planned(problem)  # which says what is wrong
    best = min(plans, key=lambda plan: plan.step_seconds)
    return best if best.problem.stages == problem.stages else replace(best, asked=problem)


def _path(problem: Problem) -> list[Problem]:
    """A list of partitions that starts with ``problem``. Each has a lower bound than the one before."""
    path, left = [problem], _WORK
    size = sum(map(len, problem.lanes))
    while left > 0:
        best = path[-1]
        for counts in _moves([len(stage.blocks) for stage in path[-1].stages]):
            other = problem.restaged(counts)
            if other.bound_seconds < best.bound_seconds * (1 - _ROUNDING):
                best = other
            left -= size
            if left <= 0:
                break
        if best is path[-1]:
            break
        path.append(best)
    return path


def _moves(counts: Sequence[int]) -> Iterator[list[int]]:
    """All counts after one block has moved to another stage. Every stage keeps at least one block."""
    for give, few in enumerate(counts):
        for take in range(len(counts)):
            if take != give and few > 1:
                found = list(counts)
                found[give] -= 1
                found[take] += 1
                yield found
