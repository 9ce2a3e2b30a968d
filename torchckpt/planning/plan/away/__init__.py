"""Plans that send blocks to a host: the same first blocks of each visit of a rank, as many as pay.

The bytes of a rank follow from its own order. So for each rank and each number of blocks that go, the fewest that have
to be recomputed beside them are found first; then the ranks are tried in turn, by the seconds of the whole step.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torchckpt.planning.order.schedule import BACKWARDS, Action, Kind, Schedule, Visit
from torchckpt.planning.plan.problem import Problem
from torchckpt.planning.work.choice import Choice, Choices
from torchckpt.planning.work.move import Boundary, Move

__all__ = ["bound_seconds", "offload_only", "planned_away"]

_ROUNDING, _DISTANCES, _WORK = 1e-9, (1, 2, 3, 5, 8), 400_000


class AwayPlan(NamedTuple):
    schedule: Schedule
    choices: Choices
    moves: tuple[Move, ...]


class _Way(NamedTuple):
    """What a rank does with each of its visits."""

    away: int
    late: int
    distance: int
    """Boundaries between a forward and the release, and between the issue and the backward."""


def bound_seconds(problem: Problem) -> float:
    """A lower bound on the step of every plan. With a host: of one whose memory has no limit."""
    if problem.host is None:
        return problem.bound_seconds
    return problem.within([max(problem.keep_all.peak_bytes) * 2] * len(problem.budget_bytes)).bound_seconds


def planned_away(problem: Problem, recomputes: bool = True) -> AwayPlan | None:
    """The shortest plan that is found; None if none fits."""
    options = [list(_ways(problem, rank, recomputes)) for rank in range(len(problem.schedule.ranks))]
    if not all(options):
        return None
    chosen = [min(ways, key=lambda way: (way.late, way.away, way.distance)) for ways in options]
    best, plan = math.inf, _plan(problem, chosen)
    left = _WORK // max(1, sum(map(len, problem.schedule.ranks)))
    is_shorter = True
    while is_shorter and left > 0:
        is_shorter = False
        for rank, ways in enumerate(options):
            for way in ways:
                tried = _plan(problem, [*chosen[:rank], way, *chosen[rank + 1 :]])
                seconds = problem.step(tried.choices, tried.schedule, tried.moves).seconds
                left -= 1
                if seconds < best * (1 - _ROUNDING):
                    best, plan, chosen[rank], is_shorter = seconds, tried, way, True
    return plan


def offload_only(problem: Problem) -> float:
    """The seconds of the shortest plan that is found in which nothing is recomputed; infinite if none fits."""
    plan = planned_away(problem, recomputes=False)
    return math.inf if plan is None else problem.step(plan.choices, plan.schedule, plan.moves).seconds


def _ways(problem: Problem, rank: int, recomputes: bool) -> Iterator[_Way]:
    """For each number of blocks that go, the fewest that are recomputed so that the rank is within its budget."""
    stages = {action.stage for action in problem.schedule.ranks[rank]}
    blocks = max((len(problem.stages[stage].blocks) for stage in stages), default=0)
    for away in range(blocks + 1):
        for distance in _DISTANCES if away else (1,):
            for late in range(blocks + 1 - away if recomputes else 1):
                way = _Way(away, late, distance)
                if _fits(problem, rank, way):
                    yield way
                    break


def _fits(problem: Problem, rank: int, way: _Way) -> bool:
    others = [_Way(0, 0, 1)] * len(problem.schedule.ranks)
    plan = _plan(problem, [*others[:rank], way, *others[rank + 1 :]], only=rank)
    step = problem.step(plan.choices, plan.schedule, plan.moves)
    peak = max((level.highest for level in step.levels(rank)), default=0.0)
    is_on_host = step.host_peak_bytes[rank] <= problem.host_bytes[rank] * (1 + _ROUNDING)
    return is_on_host and peak <= problem.budget_bytes[rank] * (1 + _ROUNDING)


def _plan(problem: Problem, ways: Sequence[_Way], only: int | None = None) -> AwayPlan:
    choices: dict[Visit, Choice] = {}
    moves: list[Move] = []
    for rank, way in enumerate(ways):
        if only is None or rank == only:
            own = {visit: _choice(len(problem.stages[visit[0]].blocks), way) for visit in _visits(problem, rank)}
            choices |= own
            moves += _moves(problem, rank, own, way.distance)
    return AwayPlan(problem.schedule, choices, tuple(moves))


def _visits(problem: Problem, rank: int) -> Iterator[Visit]:
    return (action.visit for action in problem.schedule.ranks[rank] if action.kind is Kind.FORWARD)


def _choice(blocks: int, way: _Way) -> Choice:
    away, last = min(way.away, blocks), min(way.away + way.late, blocks)
    return Choice(tuple(range(last, blocks)), (), tuple(range(away, last)), tuple(range(away)))


def _moves(problem: Problem, rank: int, choices: Mapping[Visit, Choice], distance: int) -> Iterator[Move]:
    order = problem.schedule.ranks[rank]
    boundaries = [Boundary(*pair) for index, action in enumerate(order) for pair in _boundaries(problem, index, action)]
    position = {boundary: number for number, boundary in enumerate(boundaries)}
    forwards = {action.visit: index for index, action in enumerate(order) if action.kind is Kind.FORWARD}
    backwards = {action.visit: index for index, action in enumerate(order) if action.kind in BACKWARDS}
    for visit, choice in choices.items():
        for block in choice.away:
            used = position[Boundary(backwards[visit], block)]
            release = min(position[Boundary(forwards[visit], block)] + 1 + distance, used)
            issue = max(release, used - distance)
            yield Move(*visit, block, boundaries[release], boundaries[issue])


def _boundaries(problem: Problem, index: int, action: Action) -> Iterator[tuple[int, int]]:
    blocks = len(problem.stages[action.stage].blocks)
    if action.kind is Kind.FORWARD:
        yield from ((index, block) for block in range(blocks + 1))
    elif action.kind in BACKWARDS:
        yield from ((index, block) for block in range(blocks, -1, -1))
    else:
        yield index, 0
