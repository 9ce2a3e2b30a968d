"""Eviction: add repeats until a schedule fits its budget; first those with the lowest cost for the memory they free."""
from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from torchckpt.planning.remat.flow.incremental import Stages

__all__ = ["Closure", "Eviction", "EvictionScore"]

_LONGEST = 64
"""The most operations that one eviction repeats; later evictions may add more."""

_WORK = 40
"""The work per operation after which a sweep gives up, since repeats only lead to more repeats."""


@dataclass(frozen=True)
class EvictionScore:
    """The score of a storage to drop, lower is better: recompute seconds / (bytes ** ``size`` * stages ** ``length``).

    The stages are those in which the storage is gone. Belady (1966) evicts what is needed last; DTR (Kirisame et al.,
    2021) weighs cost, size and staleness. Which exponents are best depends on the graph, so a planner tries some. If
    the recomputed storage would not fit at its next use, its score is multiplied by ``put_off``. ``noise`` multiplies
    the score of a storage. Without ``gradients``, storages that the backward writes are kept, since recomputing them
    takes much of the backward.
    """

    size: float = 1.0
    length: float = 0.5
    put_off: float = 1.0
    gradients: bool = True
    noise: Callable[[int], float] | None = None


@dataclass(frozen=True)
class Closure:
    """The repeats that recompute a storage, and their score for the stage that is over the budget."""

    score: float
    repeats: tuple[int, ...]


class Eviction:
    """Sweeps over the stages. Where memory is over the budget, it drops storages that are alive but not touched there.

    A dropped storage is recomputed in the stage of its next use. The storages that this repeat reads stay alive until
    then, or are recomputed too if that scores better. A later stage of the sweep may drop them, too.
    """

    def __init__(
        self, stages: Stages, budget_bytes: int, scoring: EvictionScore, kept: frozenset[int] = frozenset()
    ) -> None:
        self.stages, self.tables = stages, stages.tables
        self.budget_bytes, self.scoring = budget_bytes, scoring
        self.kept = kept if scoring.gradients else kept | self.tables.gradients
        self.heap: list[tuple[float, int, int]] = []
        self.put_off: set[int] = set()

    def run(self, most_cost: float = math.inf) -> bool:
        """Add repeats until the schedule fits; whether it does. Gives up beyond ``most_cost``, or after much work."""
        stages, during, budget = self.stages, self.stages.during, self.budget_bytes
        fits, hopeless = True, -1
        most_work = stages.work + _WORK * (self.tables.count + 100)
        stage = during.over(0, budget)
        self._scan(stage)
        while stage < self.tables.count:
            if stages.cost > most_cost or stages.work > most_work:
                return False
            self.put_off = set()
            low = self._evict(stage)
            if low is None:
                fits, hopeless = False, stage
            elif low < stage and during.most(max(low, hopeless + 1), stage) > budget:
                stage = during.over(max(low, hopeless + 1), budget)
                self._scan(stage)
            if during.at(stage) <= budget or stage == hopeless:
                passed, stage = stage, during.over(stage + 1, budget)
                self._pass(passed, stage)
        return fits and stages.peak_bytes <= budget

    def _scan(self, stage: int) -> None:
        """Fill the heap with the storages that wait across ``stage``: alive in it, but not touched by it."""
        self.heap = []
        if stage < self.tables.count:
            entries = (self._entry(storage, stage) for storage in self.tables.recoverable)
            self.heap = [entry for entry in entries if entry is not None]
            heapify(self.heap)

    def _pass(self, passed: int, stage: int) -> None:
        """Add to the heap the storages touched from ``passed`` up to ``stage``, which may wait across ``stage``."""
        tables = self.tables
        if stage == tables.count:
            return
        touched: set[int] = set()
        for between in range(passed, stage):
            touched.update(tables.first_touches[between])
            for position in self.stages.repeats[between]:
                touched.update(tables.repeat_reads[position], tables.repeat_writes[position])
        for storage in touched & tables.recoverable:
            self._push(storage, stage)

    def _push(self, storage: int, stage: int) -> None:
        entry = self._entry(storage, stage)
        if entry is not None:
            heappush(self.heap, entry)

    def _entry(self, storage: int, stage: int) -> tuple[float, int, int] | None:
        end = self._waits(storage, stage)
        if end < 0 or storage in self.kept:
            return None
        closure = self._closure(storage, end, stage)
        return None if closure is None else (closure.score, storage, end)

    def _waits(self, storage: int, stage: int) -> int:
        """The stage that next touches ``storage``, if it waits across ``stage``; else -1."""
        touches = self.stages.touches[storage]
        index = bisect_left(touches, stage)
        if index in (0, len(touches)):
            return -1
        end = touches[index]
        return -1 if end == stage or end in self.stages.births[storage] else end

    def _evict(self, stage: int) -> int | None:
        """Drop the best storage. Returns the first stage whose memory changed, or None if nothing can be dropped."""
        while self.heap:
            score, storage, end = heappop(self.heap)
            now = self._waits(storage, stage)
            if now < 0:
                continue
            closure = self._closure(storage, now, stage)
            if closure is None:
                continue
            stale = closure.score > score * 1.0001 or now != end
            if stale and storage not in self.put_off and self.heap and closure.score > self.heap[0][0]:
                heappush(self.heap, (closure.score, storage, now))
                continue
            before, mark = self.stages.during.at(now), len(self.stages.log)
            low = self._apply(closure, now, stage)
            if storage in self.put_off or self.stages.during.at(now) <= max(before, self.budget_bytes):
                return low
            self.stages.back(mark)
            self.put_off.add(storage)
            heappush(self.heap, (closure.score * self.scoring.put_off, storage, now))
        return self._squeeze(stage)

    def _apply(self, closure: Closure, end: int, stage: int) -> int:
        low = self.stages.add(end, *closure.repeats)
        self._bring_forward(end, closure.repeats)
        reads = {storage for position in closure.repeats for storage in self.tables.repeat_reads[position]}
        for storage in reads & self.tables.recoverable:
            self._push(storage, stage)
        return low

    def _bring_forward(self, stage: int, positions: tuple[int, ...]) -> None:
        """Remove later repeats of ``positions`` where there is room to keep what ``stage`` now recomputes."""
        stages, last = self.stages, stage
        spared: set[tuple[int, int, bool]] = set()
        for position in positions:
            for storage in self.tables.repeat_writes[position]:
                later = self._next_birth(storage, stage)
                if later is not None and position in stages.repeats[later] and self._room(storage, stage, later):
                    spared.add((later, position, False))
                    last = max(last, later)
        mark = len(stages.log)
        while spared:
            low = stages.change(sorted(spared))
            if stages.during.most(max(low, stage), last + 1) <= self.budget_bytes:
                return
            stages.back(mark)
            spared = set(sorted(spared)[: len(spared) // 2])

    def _next_birth(self, storage: int, stage: int) -> int | None:
        touches = self.stages.touches[storage]
        index = bisect_left(touches, stage + 1)
        return touches[index] if index < len(touches) and touches[index] in self.stages.births[storage] else None

    def _room(self, storage: int, stage: int, later: int) -> bool:
        room = self.budget_bytes - self.tables.sizes[storage]
        return self.stages.during.most(stage + 1, later) <= room

    def _closure(self, storage: int, end: int, stage: int) -> Closure | None:
        """The repeats in ``end`` with the best score that recompute ``storage``, so that it can be gone in ``stage``.

        A storage that a repeat reads, and that would be dead by then, is kept alive (maybe across ``stage``) or
        recomputed, too.
        """
        tables = self.tables
        writer = tables.writer[storage]
        self.stages.work += 1
        if end < tables.earliest[writer]:
            return None
        found, cost, gain = [writer], tables.repeat_cost[writer], self._gain(writer, end, stage)
        if gain <= 0:  # all its storages are empty
            return None
        power = self.scoring.size
        value = (end - self.stages.before(storage, end)) ** self.scoring.length
        if self.scoring.noise:
            value *= self.scoring.noise(storage)
        held: dict[int, float] = {}
        net = gain - self._hold(writer, end, stage, held, found)
        best, number = 1e300, 0
        while True:
            if net > 0 and cost / (net ** power * value) < best:
                best, number = cost / (net ** power * value), len(found)
            if not held or len(found) >= _LONGEST or cost / (gain ** power * value) >= best:
                break
            victim = min(held, key=held.__getitem__)
            if held[victim] == math.inf:
                break
            position = tables.writer[victim]
            cost += self._price(victim, position, end)
            found.append(position)
            for output in tables.repeat_writes[position]:
                if held.pop(output, None) is not None:
                    net += tables.sizes[output]
            net -= self._hold(position, end, stage, held, found)
        return Closure(best, tuple(found[:number])) if number else None

    def _hold(self, position: int, end: int, stage: int, held: dict[int, float], found: list[int]) -> int:
        """Add to ``held`` the storages that a repeat of ``position`` in ``end`` keeps alive across ``stage``.

        Returns:
            their bytes.
        """
        tables, more = self.tables, 0
        for storage in tables.repeat_reads[position]:
            touches = self.stages.touches[storage]
            index = bisect_left(touches, end)
            if index < len(touches) and (touches[index] == end or touches[index] not in self.stages.births[storage]):
                continue
            writer = tables.writer[storage]
            if storage in held or writer in found or touches[index - 1] >= stage:
                continue
            size = tables.sizes[storage]
            more += size
            may = storage in tables.recoverable and storage not in self.kept and end >= tables.earliest[writer]
            held[storage] = tables.repeat_cost[writer] / size if may and size else math.inf
        return more

    def _gain(self, writer: int, end: int, stage: int) -> int:
        """The bytes freed in ``stage`` if ``writer`` repeats in ``end``."""
        gain = 0
        for storage in self.tables.repeat_writes[writer]:
            waits = self._waits(storage, stage)
            if waits >= end and (waits == end or self.stages.alive(storage, end)):
                gain += self.tables.sizes[storage]
        return gain

    def _price(self, storage: int, position: int, end: int) -> float:
        """The cost of a repeat of ``position`` in ``end``; 0 if it replaces a later repeat."""
        later = self._next_birth(storage, end)
        if later is not None and position in self.stages.repeats[later] and self._room(storage, end, later):
            return 0.0
        return self.tables.repeat_cost[position]

    def _squeeze(self, stage: int) -> int | None:
        """Drop a storage that ``stage`` itself touches, but does not need from its start to its end."""
        before, mark = self.stages.during.at(stage), len(self.stages.log)
        for target, position in self._squeezable(stage):
            low = self.stages.add(target, position)
            if self.stages.during.at(stage) < before:
                return low
            self.stages.back(mark)
        return None

    def _squeezable(self, stage: int) -> list[tuple[int, int]]:
        """Repeats (stage and position) that could lower the memory of ``stage``, the cheapest per byte first.

        A storage that is alive before ``stage`` is repeated in it; one that is alive after it, at its next use.
        """
        tables, stages = self.tables, self.stages
        found: set[tuple[int, int]] = set()
        touched = set(tables.first_touches[stage])
        for position in stages.repeats[stage]:
            touched.update(tables.repeat_reads[position], tables.repeat_writes[position])
        for storage in touched & tables.recoverable - self.kept:
            position, touches = tables.writer[storage], stages.touches[storage]
            index = bisect_left(touches, stage + 1)
            if index < len(touches) and touches[index] not in stages.births[storage]:
                found.add((touches[index], position))
            if stage not in stages.births[storage]:
                found.add((stage, position))
        worth = (sum(tables.sizes[s] for s in tables.repeat_writes[position]) or 1e-9 for _, position in sorted(found))
        rated = sorted((tables.repeat_cost[p] / bytes_, t, p) for (t, p), bytes_ in zip(sorted(found), worth))
        return [(t, p) for _, t, p in rated if t >= tables.earliest[p] and p not in stages.repeats[t]]
