"""Plans that send blocks to a host: the same first blocks of each visit of a rank, as many as pay.

Where a copy ends, by the times of a step like it, its bytes are released; where it has to begin to be back in time, it
is issued. The bytes of a rank follow from its own order. So for each rank and each number of blocks that go, the fewest
that have to be recomputed beside them are found first; then the ranks are tried in turn, by the seconds of the step.
The times of the best step place the copies of the next round.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from torchckpt.planning.order.schedule import Kind, Schedule, Visit
from torchckpt.planning.plan.away.moves import ROUNDING, Moves, Times, enough
from torchckpt.planning.plan.problem import Problem
from torchckpt.planning.step.boundary import places_of
from torchckpt.planning.step.simulated import Step
from torchckpt.planning.work.choice import Choice, Choices
from torchckpt.planning.work.move import Boundary, Move

__all__ = ["AwayPlan", "offload_only", "planned_away"]

_ROUNDS, _WORK = 3, 300_000
_LEADS = (1.0, 1.5, 2.5)
"""How much earlier than it has to begin a copy back may begin, in units of its own seconds."""


class AwayPlan(NamedTuple):
    schedule: Schedule
    choices: Choices
    moves: tuple[Move, ...]


class _Way(NamedTuple):
    """What a rank does with each of its visits."""

    away: int
    late: int
    lead: float


def planned_away(problem: Problem, recomputes: bool = True) -> AwayPlan | None:
    """The shortest plan that is found; None if none fits."""
    best, plan, like = math.inf, None, problem.keep_all
    for _ in range(_ROUNDS):
        times = [_times(like, rank) for rank in range(len(problem.schedule.ranks))]
        found = _descent(problem, times, recomputes)
        if found is None:
            break
        like = problem.step(found.choices, found.schedule, found.moves)
        if like.seconds >= best * (1 - ROUNDING):
            break
        best, plan = like.seconds, found
    return plan


def offload_only(problem: Problem) -> float:
    """The seconds of the shortest plan that is found in which nothing is recomputed; infinite if none fits."""
    plan = planned_away(problem, recomputes=False)
    return math.inf if plan is None else problem.step(plan.choices, plan.schedule, plan.moves).seconds


def _times(step: Step, rank: int) -> Times:
    starts: list[float] = []
    is_replayed = False
    for position, start in enumerate(step.run.starts[rank]):
        if not is_replayed:  # the backward of a late recompute begins with it
            starts.append(start)
        is_replayed = step.is_late(rank, position)
    boundaries: list[Boundary] = []
    seconds: list[float] = []
    for now, places in zip(starts, places_of(step.schedule.ranks[rank], step.stages, step.choice, ())):
        for place in places:
            boundaries.append(place.boundary)
            seconds.append(max(now, seconds[-1]) if seconds else now)
            now += place.seconds
    return Times(boundaries, seconds)


def _descent(problem: Problem, times: Sequence[Times], recomputes: bool) -> AwayPlan | None:
    """The shortest plan that is found where copies are placed by these times."""
    options = [list(_ways(problem, rank, times, recomputes)) for rank in range(len(times))]
    if not all(options):
        return None
    chosen = [min(ways, key=lambda way: (way.late, way.away, way.lead)) for ways in options]
    best, plan = math.inf, _plan(problem, times, chosen)
    left = max(20, _WORK // max(1, sum(map(len, problem.schedule.ranks))) // _ROUNDS)
    is_shorter = True
    while is_shorter and left > 0:
        is_shorter = False
        for rank, ways in enumerate(options):
            for way in ways:
                tried = _plan(problem, times, [*chosen[:rank], way, *chosen[rank + 1 :]])
                seconds = problem.step(tried.choices, tried.schedule, tried.moves).seconds
                left -= 1
                if seconds < best * (1 - ROUNDING):
                    best, plan, chosen[rank], is_shorter = seconds, tried, way, True
    return plan


def _ways(problem: Problem, rank: int, times: Sequence[Times], recomputes: bool) -> Iterator[_Way]:
    """For each number of blocks that go, the fewest that are recomputed so that the rank is within its budget."""
    stages = {action.stage for action in problem.schedule.ranks[rank]}
    blocks = max((len(problem.stages[stage].blocks) for stage in stages), default=0)
    for away in range(blocks + 1):
        for lead in _LEADS if away else _LEADS[:1]:
            for late in range(blocks + 1 - away if recomputes else 1):
                way = _Way(away, late, lead)
                if _of_rank(problem, rank, times[rank], way) is not None:
                    yield way
                    break


def _plan(problem: Problem, times: Sequence[Times], ways: Sequence[_Way]) -> AwayPlan:
    choices: dict[Visit, Choice] = {}
    moves: list[Move] = []
    for rank, way in enumerate(ways):
        of_rank = _of_rank(problem, rank, times[rank], way)
        if of_rank is not None:
            choices |= of_rank[0]
            moves += of_rank[1]
    return AwayPlan(problem.schedule, choices, tuple(moves))


def _of_rank(
    problem: Problem, rank: int, times: Times, way: _Way
) -> tuple[dict[Visit, Choice], list[Move]] | None:
    """The choices and moves of a rank; None if they exceed its budget or its host."""
    order = problem.schedule.ranks[rank]
    visits = [action.visit for action in order if action.kind is Kind.FORWARD]
    choices = {visit: _choice(len(problem.stages[visit[0]].blocks), way) for visit in visits}
    places = [*chain.from_iterable(places_of(order, problem.stages, choices.__getitem__, ()))]
    moves = Moves(problem, rank, choices, places, times, way.lead).placed()
    if moves is None:
        return None
    step = problem.step(choices, problem.schedule, tuple(moves))
    is_within = max((level.highest for level in step.levels(rank)), default=0.0) <= enough(problem.budget_bytes[rank])
    if moves and step.host_peak_bytes[rank] > enough(problem.host_bytes[rank]):
        return None
    return (choices, moves) if is_within else None


def _choice(blocks: int, way: _Way) -> Choice:
    away, last = min(way.away, blocks), min(way.away + way.late, blocks)
    return Choice(tuple(range(last, blocks)), (), tuple(range(away, last)), tuple(range(away)))
