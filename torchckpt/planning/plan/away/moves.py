"""Moves: where the blocks of one rank leave it and come back, for choices that are given."""
from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchckpt.planning.order.schedule import BACKWARDS, Kind, Visit
from torchckpt.planning.plan.problem import Problem
from torchckpt.planning.step.boundary import Place
from torchckpt.planning.work.choice import Choice
from torchckpt.planning.work.move import Boundary, Move

__all__ = ["ROUNDING", "Moves", "Times", "enough"]

ROUNDING = 1e-9


class Times(NamedTuple):
    """The boundaries of a rank in their order, and when each is reached."""

    boundaries: list[Boundary]
    seconds: list[float]


def enough(limit: float) -> float:
    """``limit``, and what sums of floating-point numbers may be off."""
    return limit * (1 + ROUNDING)


class Moves:
    """Places the moves of one rank, boundary by boundary.

    A block is released where its copy has ended, earlier where memory is needed. It is issued where its copy has to
    begin, later where there is no room, at the latest where it is used.
    """

    def __init__(
        self, problem: Problem, rank: int, choices: Mapping[Visit, Choice], places: Sequence[Place], times: Times,
        lead: float,
    ) -> None:
        self._stages, self._places, self._times = problem.stages, places, times
        self._limit = enough(problem.budget_bytes[rank])
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
            while pending and pending[0][0] <= enough(now):
                self._let_go(pending, released, number)
            while place_of_use < len(self._uses):
                used, block = self._uses[place_of_use]
                moved, is_due = self._moved(block), used == number
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
