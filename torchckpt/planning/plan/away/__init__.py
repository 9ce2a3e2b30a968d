"""Away: plans that also send blocks to a host, and their bound.

    bound             no such plan is shorter
    search            the choices of all ranks; a few numbers that give those of one
    simulator         a step, or one rank of it
    rank              what a rank does at each boundary
    outlook           its choices, and what it can expect; what stages take
"""
from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeAlias

from torchckpt.planning.order.schedule import Action, Schedule, Visit
from torchckpt.planning.plan.away.bound import bound_seconds
from torchckpt.planning.plan.away.rank import Rank
from torchckpt.planning.plan.away.search import Search
from torchckpt.planning.plan.away.simulator import Simulator
from torchckpt.planning.plan.problem import Problem
from torchckpt.planning.plan.search.lane import Lane
from torchckpt.planning.work.choice import Choice
from torchckpt.planning.work.host import Boundary, Move

__all__ = ["bound_seconds", "planned_away"]

_Away: TypeAlias = tuple[Schedule, dict[Visit, Choice], tuple[Move, ...]]


def planned_away(problem: Problem) -> tuple[_Away | None, float]:
    """The order, the choices and the moves of the shortest plan with a host that is found; None if none fits. And the
    seconds of the shortest in which nothing is recomputed; infinite if none fits."""
    search = _search(problem, drops=True)
    starts = search.starts()
    alone = min(_search(problem, drops=False).starts(), key=lambda candidate: candidate.step.key, default=None)
    starts = sorted([*starts, *([alone] if alone else [])], key=lambda candidate: candidate.step.key)
    away = _away(problem, search.best(starts).step.ranks) if starts else None
    return away, alone.step.key[0] if alone else math.inf


def _search(problem: Problem, drops: bool) -> Search:
    assert problem.host is not None
    return Search(Simulator(problem, problem.host), problem.host_bytes, bound_seconds(problem), drops)


def _away(problem: Problem, ranks: list[Rank]) -> _Away:
    rows: list[tuple[Action, ...]] = []
    choices: dict[Visit, Choice] = {}
    moves: list[Move] = []
    for lane, rank in zip(problem.lanes, ranks):
        visits = ((kind, *lane.visits[visit]) for kind, visit, _ in rank.order)
        rows.append(tuple(Action(stage, kind, micro_batch) for kind, stage, micro_batch in visits))
        choices |= {lane.visits[visit]: _choice(rank, visit) for visit in range(len(lane.visits))}
        moves += _moves(lane, rank)
    return replace(problem.schedule, ranks=tuple(rows)), choices, tuple(moves)


def _choice(rank: Rank, visit: int) -> Choice:
    work, away = rank.works[visit], rank.away[visit]
    dropped = [block for block in range(away, away + rank.dropped[visit]) if work.freed[block]]
    late = [block for block in dropped if block < away + rank.dropped[visit] - rank.early[visit]]
    gone = [block for block in range(away) if work.moved[block]]
    kept = [block for block in range(work.blocks) if block not in dropped and block not in gone]
    return Choice(tuple(kept), tuple(dropped[len(late) :]), tuple(late), tuple(gone))


def _moves(lane: Lane, rank: Rank) -> list[Move]:
    releases = {(visit, block): Boundary(*at) for visit, block, *at in rank.released}
    return [
        Move(*lane.visits[visit], block, releases[visit, block], Boundary(*at), behind)
        for visit, block, *at, behind in rank.issued
        if rank.works[visit].moved[block]
    ]
