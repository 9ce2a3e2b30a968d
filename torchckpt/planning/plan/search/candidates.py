"""Search: choose the blocks to keep, and how ranks decide, so that the step is short.

The search chooses two things for each rank: for how many blocks of each visit it reserves memory at the backward
(recomputing early takes memory in which other blocks could be kept), and how long weight gradients may wait. It first
tries the same choice for all ranks. It then changes the best one by local search: some consecutive visits of one rank
at a time, most often on the critical path. It ends early when a step is proven to be the shortest.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import TypeVar

from torchckpt.planning.order.program import Program
from torchckpt.planning.plan.search.dispatch import SimulatedStep, Strategy, dispatch
from torchckpt.planning.plan.search.lane import CHOICES, DROP_ORDERS, Holding, Lane, Reserve

__all__ = ["Candidate", "Search"]

_T = TypeVar("_T")

_QUICK = (Strategy(), Strategy(all_at_once=True), Strategy(all_at_once=True, next_only=True))
_PATIENT = (
    Strategy(patience=0.25),
    Strategy(patience=0.5),
    Strategy(all_at_once=True, patience=0.5),
    Strategy(patience=1.0),
)
_SCARCE = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
_ROUNDS = 3
"""A step is simulated so often with the same choices, or until it is longer than the best. Each time, ranks expect the
arrivals of the time before."""
_WORK, _FEWEST, _GAIN = 300_000, 16, 1e-3
"""The actions to simulate in all. If these are fewer than ``_FEWEST`` steps of the schedule, then so many steps, and as
many again after each step that is shorter by the share ``_GAIN``."""
_PARTS = 8
"""How many numbers of reserved blocks are tried for a rank, evenly spaced from none to all."""
_OVERHEAD = 20
"""The fixed cost of one try, in actions."""
_ROUNDING = 1e-9
_NO_STEP = SimulatedStep(math.inf, [], [], {})


@dataclass(frozen=True)
class Candidate:
    """Choices, and the step that was simulated with them."""

    reserves: tuple[Reserve, ...]
    chosen: tuple[list[Holding], ...]
    """The holding of each rank and visit."""
    strategy: Strategy
    step: SimulatedStep = _NO_STEP

    @property
    def limit_seconds(self) -> float:
        """A step that takes longer than this is no better."""
        return self.step.step_seconds * (1 + _ROUNDING)

    @property
    def recompute_seconds(self) -> float:
        return sum(holding.late_seconds[0] for rank in self.chosen for holding in rank)

    def with_rank(self, rank: int, reserve: Reserve, chosen: list[Holding]) -> Candidate:
        """This one with other choices for ``rank``. Its step is still the old one."""
        reserves = (*self.reserves[:rank], reserve, *self.reserves[rank + 1 :])
        return replace(self, reserves=reserves, chosen=(*self.chosen[:rank], chosen, *self.chosen[rank + 1 :]))


class Search:
    """Looks for the shortest step, and ends when it takes ``target_seconds``, a lower bound. ``program`` has no weight
    gradients; the budget of each lane is large enough to recompute everything. If it can ``keep_all``, it begins with
    that, and drops blocks only if that makes room for weight gradients that wait."""

    def __init__(self, program: Program, lanes: Sequence[Lane], target_seconds: float, keep_all: bool) -> None:
        self.program, self.lanes, self.keep_all = program, lanes, keep_all
        self.target_seconds = target_seconds * (1 + _ROUNDING)
        self.random = Random(0)
        self.fewest = _FEWEST * sum(map(len, lanes))
        self.work = max(_WORK, self.fewest)
        """The actions that may still be simulated."""
        blocks = {holdings.stage.blocks for lane in lanes for holdings in lane.holdings}
        self.is_equal = all(len(set(of_stage)) <= 1 for of_stage in blocks)
        self.most_blocks = max(map(len, blocks), default=0)
        self.is_split = any(any(lane.is_split) for lane in lanes)
        chosen = [lane.all_kept() if keep_all else lane.all_dropped() for lane in lanes]
        reserves = [lane.reserve(0, 0, DROP_ORDERS[0], CHOICES[0]) for lane in lanes]
        self.best = self._simulated(Candidate(tuple(reserves), tuple(chosen), Strategy()))

    def run(self) -> Candidate:
        if self.is_split and self.keep_all:
            self._try_patience()
            self._try_scarce()
        if self.keep_all and self._has_room_for_all:
            return self.best
        self._try_uniform()
        if self.is_split:
            self._try_patience()
        start, share = self._half_reserved("even", Strategy(all_at_once=True)), self.work // 4
        if not self.is_done:
            self._tune_ranks(start, self.work - share)
        self._tune_ranks(self.best, self.work - share)
        for choice, strategy in (("last", Strategy(all_at_once=True)), ("even", Strategy())):
            if not self.is_done:
                self._improve(self._half_reserved(choice, strategy), self.work - share // 2)
        self._improve(self.best, 0)
        return self._with_less_recompute()

    @property
    def is_done(self) -> bool:
        return self.work <= 0 or self.best.step.step_seconds <= self.target_seconds

    def _simulated(self, changed: Candidate, limit_seconds: float = math.inf) -> Candidate:
        """``changed`` with a new step. Ranks expect messages at the times of its old step."""
        expected = changed.step.arrived if changed.strategy.patience else ()
        step = dispatch(self.program, self.lanes, changed.chosen, changed.strategy, expected, limit_seconds)
        self.work -= _OVERHEAD + sum(map(len, step.done))
        return replace(changed, step=step)

    def _offer(self, candidate: Candidate) -> None:
        if candidate.step.sort_key < self.best.step.sort_key:
            if self.fewest > _WORK and candidate.step.step_seconds < self.best.step.step_seconds * (1 - _GAIN):
                self.work = max(self.work, self.fewest)
            self.best = candidate

    def _try_uniform(self) -> None:
        """Try the same choice for all ranks and all visits."""
        for early, wait, order, choice in self._uniform():
            reserves = tuple(lane.reserve(early, wait, order, choice) for lane in self.lanes)
            kept = tuple(map(Lane.keep, self.lanes, reserves))
            for strategy in _QUICK:
                if self.is_done:
                    return
                self._offer(self._simulated(Candidate(reserves, kept, strategy), self.best.limit_seconds))

    def _uniform(self) -> Iterator[tuple[int, int, str, str]]:
        most = self.most_blocks
        reserved = [(early, 0) for early in sorted({0, most // 2, most})]
        reserved += [(most, wait) for wait in (1, 3) if self.is_split]
        rules = [("first", "last"), ("first", "even")]
        if not self.is_equal:
            rules += [("cheap", "last"), ("cheap", "even"), ("cheap", "cheap")]
        for early, wait in reserved:
            for order, choice in rules:
                yield early, wait, order, choice

    def _try_patience(self) -> None:
        start = self.best
        for strategy in _PATIENT:
            candidate = start
            for _ in range(_ROUNDS):
                if self.is_done:
                    return
                candidate = self._simulated(replace(candidate, strategy=strategy), self.best.limit_seconds)
                self._offer(candidate)
                if not candidate.step.is_complete:
                    break

    @property
    def _has_room_for_all(self) -> bool:
        """Whether every block can be kept and every weight gradient can wait, so that dropping blocks gains nothing."""
        full = (sum(holdings.full_bytes for holdings in lane.holdings) for lane in self.lanes)
        return not self.is_split or all(most <= lane.budget_bytes for most, lane in zip(full, self.lanes))

    def _try_scarce(self) -> None:
        """Try weight gradients that wait less: ranks that act as if they had less memory than there is."""
        start = self.best
        for share, strategy in product(_SCARCE, (*_QUICK, *_PATIENT)):
            if self.is_done:
                return
            scarce = replace(strategy, memory_share=share)
            self._offer(self._simulated(replace(start, strategy=scarce), self.best.limit_seconds))

    def _tune_ranks(self, current: Candidate, until: int) -> None:
        """For one rank after the other, take the reserve with the shortest step; the same for all visits of a rank."""
        most = self.most_blocks
        earlies = sorted({round(most * part / _PARTS) for part in range(_PARTS + 1)})
        for rank, lane in enumerate(self.lanes):
            for early, choice in product(earlies, CHOICES[:2]):
                if self.is_done or self.work <= until:
                    return
                reserve = lane.reserve(early, 0, DROP_ORDERS[0], choice)
                chosen = lane.keep(reserve)
                if chosen == current.chosen[rank]:
                    continue
                candidate = self._simulated(current.with_rank(rank, reserve, chosen), current.limit_seconds)
                self._offer(candidate)
                if candidate.step.sort_key < current.step.sort_key:
                    current = candidate

    def _half_reserved(self, choice: str, strategy: Strategy) -> Candidate:
        """Another start for the search: each rank reserves memory for half of the blocks of each visit."""
        reserves = tuple(lane.reserve(self.most_blocks // 2, 0, DROP_ORDERS[0], choice) for lane in self.lanes)
        return self._simulated(Candidate(reserves, tuple(map(Lane.keep, self.lanes, reserves)), strategy))

    def _improve(self, current: Candidate, until: int) -> None:
        """Change ``current`` until ``until`` of the work is left. A change that is as good or better stays."""
        path = current.step.critical()
        while not self.is_done and self.work > until:
            changed = self._changed(current, path)
            if changed is None:
                self.work -= _OVERHEAD
            elif changed.chosen == current.chosen and changed.strategy == current.strategy:
                self.work -= _OVERHEAD
                current = changed
            else:
                candidate = self._simulated(changed, current.limit_seconds)
                self._offer(candidate)
                if candidate.step.sort_key <= current.step.sort_key:
                    current, path = candidate, candidate.step.critical()

    def _changed(self, current: Candidate, path: Sequence[tuple[int, int]]) -> Candidate | None:
        """``current`` with one change, not simulated yet; None if the rank that was to change has no visits."""
        random = self.random
        if random.random() < 0.08:
            return replace(current, strategy=random.choice(_QUICK + _PATIENT))
        rank, visit = self._rank_and_visit(path)
        lane = self.lanes[rank]
        if not lane.visits:
            return None
        reserve = self._changed_reserve(lane, current.reserves[rank], visit)
        return current.with_rank(rank, reserve, lane.keep(reserve))

    def _rank_and_visit(self, path: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """A rank and a visit, most often on the critical path."""
        if self.random.random() < 0.7:
            return self.random.choice(path)
        rank = self.random.randrange(len(self.lanes))
        return rank, self.random.randrange(max(1, len(self.lanes[rank].visits)))

    def _changed_reserve(self, lane: Lane, reserve: Reserve, visit: int) -> Reserve:
        """Another reserve for a stretch of visits around ``visit``, or another choice of what is dropped."""
        random, visits = self.random, len(lane.visits)
        length = random.choice((1, 1, 2, 4, 8, visits))
        first = max(0, visit - random.choice((0, 0, length - 1)))
        stretch = range(first, min(visits, first + length))
        kind = random.random()
        if kind < 0.15:
            return replace(reserve, choice=random.choice(CHOICES[:2] if self.is_equal else CHOICES))
        if kind < 0.3 and not self.is_equal:
            return replace(reserve, order=_set(reserve.order, stretch, random.choice(DROP_ORDERS)))
        if kind < (0.4 if self.is_equal else 0.55):
            return replace(reserve, drops=self._changed_drops(reserve.drops, stretch, lane))
        if kind < 0.8 or not self.is_split:
            early = self._changed_early(reserve.early, stretch, lane)
            return replace(reserve, early=early, wait=_set(reserve.wait, stretch, 0))
        return replace(reserve, wait=_set(reserve.wait, stretch, random.choice((1, 1, 2, 3, 4))))

    def _changed_drops(self, drops: tuple[int, ...], stretch: range, lane: Lane) -> tuple[int, ...]:
        """The drops, with a random number more or fewer for each visit of the stretch."""
        by = self.random.choice((1, 1, 2, -1, -1, -self.most_blocks, self.most_blocks))
        changed = list(drops)
        for visit in stretch:
            changed[visit] = min(lane.holdings[visit].droppable, max(0, drops[visit] + by))
        return tuple(changed)

    def _changed_early(self, early: tuple[int, ...], stretch: range, lane: Lane) -> tuple[int, ...]:
        """The early blocks, with one number for all visits of the stretch, or a random number more or fewer each."""
        random, most = self.random, self.most_blocks
        goal = random.choice((0, most, random.randint(0, most), None))
        by = random.choice((-2, -1, 1, 2))
        changed = list(early)
        for visit in stretch:
            wanted = early[visit] + by if goal is None else goal
            changed[visit] = min(lane.holdings[visit].blocks, max(0, wanted))
        return tuple(changed)

    def _with_less_recompute(self) -> Candidate:
        """The best found. Where a rank can recompute less and the step gets no longer, it does."""
        best = self.best
        limit = best.limit_seconds
        order, choice = ("first", "last") if self.is_equal else ("cheap", "cheap")
        for rank, lane in enumerate(self.lanes):
            reserve = lane.reserve(0, 0, order, choice)
            other = best.with_rank(rank, reserve, lane.keep(reserve))
            if other.recompute_seconds < best.recompute_seconds * (1 - _ROUNDING):
                candidate = self._simulated(other, limit)
                if candidate.step.step_seconds <= limit:
                    best = candidate
        return best


def _set(values: tuple[_T, ...], stretch: range, value: _T) -> tuple[_T, ...]:
    return (*values[: stretch.start], *[value] * len(stretch), *values[stretch.stop :])
