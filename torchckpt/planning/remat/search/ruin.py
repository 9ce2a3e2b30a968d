"""Ruin and recreate: the local search of Schrimpf et al. (2000), on the repeats of a schedule.

Each round removes some repeats. Evictions then add others until the schedule fits its budget again. Faster schedules
are kept.
"""
from __future__ import annotations

from random import Random

from torchckpt.planning.remat.flow.incremental import Draft
from torchckpt.planning.remat.search.eviction import Eviction, EvictionScore
from torchckpt.planning.remat.search.improve import prune

__all__ = ["RuinAndRecreate"]

_SLACK = 1.15
"""The most that a new schedule may cost before it is pruned, as a multiple of the current cost."""

_WARMTH = 0.03
"""How much slower than the best schedule an accepted one may be at the start of the search."""
_LOWER = 0.97
"""The next target for a schedule that does not fit, as a share of its peak."""


class RuinAndRecreate:
    """A local search after Schrimpf et al. (2000).

    At first it also accepts schedules a little slower than the best. It is limited by counted work, and not by time, so
    its result is the same on every machine.
    """

    def __init__(self, draft: Draft, budget_bytes: int, seed: int = 0) -> None:
        self.draft, self.tables, self.budget_bytes = draft, draft.tables, budget_bytes
        self.random = Random(seed)

    def run(self, work: int) -> None:
        """Search until ``work`` is done for a schedule that fits, then as long again for the fastest one."""
        draft = self.draft
        end = draft.work + work
        while draft.work < end and draft.peak_bytes > self.budget_bytes and any(draft.repeats):
            draft.work += 10
            self._lower_round()
        if draft.peak_bytes > self.budget_bytes:
            return
        self.best_cost, self.best = draft.cost, draft.copy()
        end = draft.work + work
        while draft.work < end and any(draft.repeats):
            draft.work += 10
            self._round(_WARMTH * (end - draft.work) / work)
        draft.become(self.best)

    def _lower_round(self) -> None:
        draft, peak = self.draft, self.draft.peak_bytes
        draft.log.clear()
        target = max(self.budget_bytes, int(peak * _LOWER))
        kept = self._ruin()
        Eviction(draft, target, self._random_scoring(), frozenset(kept)).run()
        if draft.peak_bytes < peak:
            prune(draft, max(target, draft.peak_bytes))
        else:
            draft.back(0)

    def _round(self, warmth: float) -> None:
        draft, cost = self.draft, self.draft.cost
        draft.log.clear()
        kept = self._ruin()
        fits = Eviction(draft, self.budget_bytes, self._random_scoring(), frozenset(kept)).run(_SLACK * cost)
        if fits:
            prune(draft, self.budget_bytes)
        if not fits or draft.cost > max(cost, self.best_cost * (1 + warmth * self.random.random())):
            draft.back(0)
        elif draft.cost < self.best_cost * (1 - 1e-9):
            self.best_cost, self.best = draft.cost, draft.copy()

    def _ruin(self) -> set[int]:
        """Remove some repeats. Returns the storages that must not be dropped again in this round."""
        repeats = [(position, p) for position, repeats in enumerate(self.draft.repeats) for p in repeats]
        random = self.random
        kind = random.randrange(4)
        if kind == 3:
            return self._disturb(repeats)
        position, repeated = random.choice(repeats)
        if kind == 0:
            width = random.choice((0, 1, 3, 8))
            gone = [repeat for repeat in repeats if abs(repeat[1] - repeated) <= width]
        elif kind == 1:
            width = random.choice((0, 2, 5, 12))
            gone = [repeat for repeat in repeats if abs(repeat[0] - position) <= width]
        else:
            gone = random.sample(repeats, min(len(repeats), random.choice((1, 2, 3, 5))))
        kept: set[int] = set()
        for position, repeated in gone:
            self.draft.remove(position, repeated)
            if random.random() < 0.3:
                kept.update(self.tables.repeat_writes[repeated])
        return kept

    def _disturb(self, repeats: list[tuple[int, int]]) -> set[int]:
        """Add repeats at random, and remove those that they make unnecessary. Returns no storages."""
        draft, tables, random = self.draft, self.tables, self.random
        for _ in range(random.choice((1, 2))):
            position = random.randrange(tables.count)
            if tables.repeatable[position]:
                storage = tables.repeat_writes[position][0]
                ends = [end for end in draft.touches[storage][1:]
                        if end not in draft.births[storage] and end >= tables.earliest[position]
                        and position not in draft.repeats[end]]
                if ends:
                    draft.add(random.choice(ends), position)
        prune(draft, self.budget_bytes)
        return set()

    def _random_scoring(self) -> EvictionScore:
        random = self.random
        amplitude = random.choice((0.0, 0.3, 1.0))
        noise: dict[int, float] = {}

        def draw(storage: int) -> float:
            if storage not in noise:
                noise[storage] = 2 ** random.uniform(-amplitude, amplitude)
            return noise[storage]

        size, length = random.choice((1.0, 1.0, 0.7, 0.4)), random.choice((0.0, 0.25, 0.5, 1.0))
        put_off, gradients = random.choice((1.0, 8.0, 50.0)), random.random() < 0.5
        return EvictionScore(size, length, put_off, gradients, draw if amplitude else None)
