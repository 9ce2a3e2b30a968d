"""Plans that send blocks to a host: the same first blocks of each visit of a rank, as many as pay.

Where a copy ends, by the times of a step like it, its bytes are released; where it has to begin to be back in time, it
is issued. The bytes of a rank follow from its own order. So for each rank and each number of blocks that go, the fewest
that have to be recomputed beside them are found first; then the ranks are tried in turn, by the seconds of the step.
The times of the best step place the copies of the next round.
"""
from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from torchckpt.planning.order.schedule import BACKWARDS, Kind, Schedule, Visit
from torchckpt.planning.plan.problem import Problem
from torchckpt.planning.step.boundary import Place, places_of
from torchckpt.planning.step.simulated import Step
from torchckpt.planning.work.choice import Choice, Choices
from torchckpt.planning.work.move import Boundary, Move

__all__ = ["bound_seconds", "offload_only", "planned_away"]

_ROUNDING, _ROUNDS, _WORK = 1e-9, 3, 300_000
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


class _Times(NamedTuple):
    """The boundaries of a rank in their order, and when each is reached."""

    boundaries: list[Boundary]
    seconds: list[float]


def bound_seconds(problem: Problem) -> float:
    """A lower bound on the step of every plan. With a host: of one whose memory has no limit."""
    if problem.host is None:
        return problem.bound_seconds
    return problem.within([max(problem.keep_all.peak_bytes) * 2] * len(problem.budget_bytes)).bound_seconds


def planned_away(problem: Problem, recomputes: bool = True) -> AwayPlan | None:
    """The shortest plan that is found; None if none fits."""
    best, plan, like = math.inf, None, problem.keep_all
    for _ in range(_ROUNDS):
        times = [_times(like, rank) for rank in range(len(problem.schedule.ranks))]
        found = _descent(problem, times, recomputes)
        if found is None:
            break
        like = problem.step(found.choices, found.schedule, found.moves)
        if like.seconds >= best * (1 - _ROUNDING):
            break
        best, plan = like.seconds, found
    return plan


def offload_only(problem: Problem) -> float:
    """The seconds of the shortest plan that is found in which nothing is recomputed; infinite if none fits."""
    plan = planned_away(problem, recomputes=False)
    return math.inf if plan is None else problem.step(plan.choices, plan.schedule, plan.moves).seconds


def _times(step: Step, rank: int) -> _Times:
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
    return _Times(boundaries, seconds)


def _descent(problem: Problem, times: Sequence[_Times], recomputes: bool) -> AwayPlan | None:
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
                if seconds < best * (1 - _ROUNDING):
                    best, plan, chosen[rank], is_shorter = seconds, tried, way, True
    return plan


def _ways(problem: Problem, rank: int, times: Sequence[_Times], recomputes: bool) -> Iterator[_Way]:
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


def _plan(problem: Problem, times: Sequence[_Times], ways: Sequence[_Way]) -> AwayPlan:
    choices: dict[Visit, Choice] = {}
    moves: list[Move] = []
    for rank, way in enumerate(ways):
        of_rank = _of_rank(problem, rank, times[rank], way)
        if of_rank is not None:
            choices |= of_rank[0]
            moves += of_rank[1]
    return AwayPlan(problem.schedule, choices, tuple(moves))


def _of_rank(
    problem: Problem, rank: int, times: _Times, way: _Way
) -> tuple[dict[Visit, Choice], list[Move]] | None:
    """The choices and moves of a rank; None if they exceed its budget or its host."""
    order = problem.schedule.ranks[rank]
    visits = [action.visit for action in order if action.kind is Kind.FORWARD]
    choices = {visit: _choice(len(problem.stages[visit[0]].blocks), way) for visit in visits}
    places = [*chain.from_iterable(places_of(order, problem.stages, choices.__getitem__, ()))]
    moves = _Moves(problem, rank, choices, places, times, way.lead).placed()
    if moves is None:
        return None
    step = problem.step(choices, problem.schedule, tuple(moves))
    is_within = max((level.highest for level in step.levels(rank)), default=0.0) <= _enough(problem.budget_bytes[rank])
    if moves and step.host_peak_bytes[rank] > _enough(problem.host_bytes[rank]):
        return None
    return (choices, moves) if is_within else None


def _enough(limit: float) -> float:
    return limit * (1 + _ROUNDING)


def _choice(blocks: int, way: _Way) -> Choice:
    away, last = min(way.away, blocks), min(way.away + way.late, blocks)
    return Choice(tuple(range(last, blocks)), (), tuple(range(away, last)), tuple(range(away)))


class _Moves:
    """Places the moves of one rank, boundary by boundary.

    A block is released where its copy has ended, earlier where memory is needed. It is issued where its copy has to
    begin, later where there is no room, at the latest where it is used.
    """

    def __init__(
        self, problem: Problem, rank: int, choices: Mapping[Visit, Choice], places: Sequence[Place], times: _Times,
        lead: float,
    ) -> None:
        self._stages, self._places, self._times = problem.stages, places, times
        self._limit = _enough(problem.budget_bytes[rank])
        made = {
            (*place.action.visit, place.boundary.block): number
            for number, place in enumerate(places)
            if place.action.kind is Kind.FORWARD and place.boundary.block in choices[place.action.visit].away
        }
        uses = [
            (number, (*place.action.visit, place.boundary.block))
            for number, place in enumerate(places)
            if place.action.kind in BACKWARDS and (*place.action.visit, place.boundary.block) in made
        ]
        self._made, self._uses = {number: block for block, number in made.items()}, uses
        if problem.host is not None:
            self._out, self._back = problem.host.out_rate, problem.host.back_rate
        self._begins = self._latest(lead)
        self._alive = 0.0

    def _latest(self, lead: float) -> list[float]:
        """When the copy back of each use is to begin."""
        late, begins = math.inf, []
        for number, block in reversed(self._uses):
            seconds = self._moved(block) / self._back
            late = min(late, self._times.seconds[number]) - seconds
            begins.append(late - (lead - 1.0) * seconds)
        return begins[::-1]

    def _moved(self, block: tuple[int, int, int]) -> float:
        return self._stages[block[0]].moved_bytes(block[2])

    def placed(self) -> list[Move] | None:
        """The moves; None if the bytes do not fit."""
        pending: deque[tuple[float, tuple[int, int, int]]] = deque()
        released: dict[tuple[int, int, int], int] = {}
        issued: dict[tuple[int, int, int], int] = {}
        free, place_of_use = 0.0, 0
        for number, place in enumerate(self._places):
            now = self._times.seconds[number]
            while pending and pending[0][0] <= _enough(now):
                self._let_go(pending, released, number)
            while place_of_use < len(self._uses):
                used, block = self._uses[place_of_use]
                moved, is_due = self._moved(block), self._uses[place_of_use][0] == number
                if not is_due and (self._begins[place_of_use] > now or block not in released):
                    break
                while is_due and block not in released:
                    self._let_go(pending, released, number)
                while is_due and self._alive + moved + place.takes > self._limit and pending:
                    self._let_go(pending, released, number)
                if not is_due and self._alive + moved + place.takes > self._limit:
                    break
                issued[block] = number
                self._alive += moved
                place_of_use += 1
            while self._alive + place.takes > self._limit and pending:
                self._let_go(pending, released, number)
            self._alive += place.takes
            if self._alive > self._limit:
                return None
            self._alive -= place.frees
            if number in self._made:
                block = self._made[number]
                following = self._times.seconds[number + 1]
                free = max(free, following) + self._moved(block) / self._out
                pending.append((free, block))
        boundaries = [place.boundary for place in self._places]
        return [Move(*block, boundaries[released[block]], boundaries[issued[block]]) for _, block in self._uses]

    def _let_go(
        self, pending: deque[tuple[float, tuple[int, int, int]]], released: dict[tuple[int, int, int], int], number: int
    ) -> None:
        _, block = pending.popleft()
        released[block] = number
        self._alive -= self._moved(block)
