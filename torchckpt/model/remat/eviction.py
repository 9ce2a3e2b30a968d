"""Eviction: repeats added until a schedule fits its budget, the best value for the memory first."""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from torchckpt.model.remat.stages import Stages

__all__ = ["Closure", "Eviction", "Taste"]

_LONGEST = 64
"""Operations in a row that one eviction may plan to repeat: beyond it, later evictions add them one by one."""


@dataclass(frozen=True)
class Taste:
    """What makes a good victim: seconds to bring it back / (bytes ** ``size`` * stages without it ** ``length``).

    Belady evicts what is needed last, DTR (Kirisame et al., 2021) weighs cost, size and staleness; which exponents are
    best depends on the graph, so a planner tries some. ``noise`` multiplies the score of a storage.
    """

    size: float = 1.0
    length: float = 0.5
    noise: Callable[[int], float] | None = None


@dataclass(frozen=True)
class Closure:
    """The repeats that bring a storage back, and what they are worth at the stage that asks."""

    score: float
    repeats: tuple[int, ...]


class Eviction:
    """Sweeps over the stages; where memory is over the budget, storages that are only waiting are dropped.

    A dropped storage is brought back in the stage of its next use. What that repeat reads lives until then or, if that
    scores better, is brought back as well; a later stage may drop it, so a drop is revised as long as the sweep lasts.
    """

    def __init__(self, stages: Stages, budget_bytes: int, taste: Taste, kept: frozenset[int] = frozenset()) -> None:
        self.stages, self.tables = stages, stages.tables
        self.budget_bytes, self.taste, self.kept = budget_bytes, taste, kept
        self.heap: list[tuple[float, int, int]] = []
        self.work = 0

    def run(self, first: int = 0, limit: int = 1 << 60) -> bool:
        """Whether it fits now. Gives up after ``limit`` repeats more."""
        stages, during, budget = self.stages, self.stages.bytes_during, self.budget_bytes
        fits, stage, hopeless = True, first, -1
        self._scan(first)
        while stage < self.tables.count:
            if during[stage] <= budget or stage <= hopeless:
                self._pass(stage)
                stage += 1
                continue
            if self.work > limit:
                return False
            low = self._evict(stage)
            if low is None:
                fits, hopeless = False, stage
            elif low < stage and max(during[max(low, hopeless + 1):stage], default=0) > budget:
                stage = next(t for t in range(max(low, hopeless + 1), stage) if during[t] > budget)
                self._scan(stage)
        return fits and stages.peak_bytes <= budget

    def _scan(self, stage: int) -> None:
        """Everything that waits across ``stage``."""
        self.heap = []
        for storage in self.tables.recoverable:
            entry = self._entry(storage, stage)
            if entry is not None:
                self.heap.append(entry)
        heapify(self.heap)

    def _pass(self, stage: int) -> None:
        """What was touched in ``stage`` may wait across the next."""
        tables = self.tables
        touched = {*tables.first_reads[stage], *tables.first_writes[stage]}
        for position in self.stages.repeats[stage]:
            touched.update(tables.again_reads[position], tables.again_writes[position])
        for storage in touched:
            self._push(storage, stage + 1)

    def _push(self, storage: int, stage: int) -> None:
        if storage in self.tables.recoverable:
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
        """The stage that next touches it, if it is alive in ``stage`` without being touched; else -1."""
        touches = self.stages.touches[storage]
        index = bisect_left(touches, stage)
        if index in (0, len(touches)):
            return -1
        end = touches[index]
        return -1 if end == stage or end in self.stages.births[storage] else end

    def _evict(self, stage: int) -> int | None:
        """Drop the best victim; the first stage whose memory changed, or None if there is none."""
        while self.heap:
            score, storage, end = heappop(self.heap)
            now = self._waits(storage, stage)
            if now < 0:
                continue
            closure = self._closure(storage, now, stage)
            if closure is None:
                continue
            if self.heap and closure.score > self.heap[0][0] and (closure.score > score * 1.0001 or now != end):
                heappush(self.heap, (closure.score, storage, now))
                continue
            return self._apply(closure, now, stage)
        return self._squeeze(stage)

    def _apply(self, closure: Closure, end: int, stage: int) -> int:
        stages, low = self.stages, end
        reads: set[int] = set()
        for position in closure.repeats:
            low = min(low, stages.add(end, position))
            reads.update(self.tables.again_reads[position])
            self.work += 1
        for position in closure.repeats:
            for storage in self.tables.again_writes[position]:
                self._bring_forward(storage, end, position)
        for storage in sorted(reads):
            self._push(storage, stage)
        return low

    def _bring_forward(self, storage: int, stage: int, position: int) -> None:
        """If the next repeat of ``position`` serves only for what this one has now, and there is room, spare it."""
        later = self._next_birth(storage, stage)
        if later is None or position not in self.stages.repeats[later]:
            return
        if self._room(storage, stage, later):
            mark = len(self.stages.log)
            low = self.stages.remove(later, position)
            if max(self.stages.bytes_during[max(low, stage):later + 1]) > self.budget_bytes:
                self.stages.back(mark)

    def _next_birth(self, storage: int, stage: int) -> int | None:
        touches = self.stages.touches[storage]
        index = bisect_left(touches, stage + 1)
        return touches[index] if index < len(touches) and touches[index] in self.stages.births[storage] else None

    def _room(self, storage: int, stage: int, later: int) -> bool:
        room = self.budget_bytes - self.tables.sizes[storage]
        return max(self.stages.bytes_during[stage + 1:later], default=0) <= room

    def _closure(self, storage: int, end: int, stage: int) -> Closure | None:
        """The best-scoring set of repeats that brings ``storage`` back in ``end``, to have it gone in ``stage``."""
        tables, sizes = self.tables, self.tables.sizes
        writer = tables.writer[storage]
        if end < tables.earliest[writer]:
            return None
        found, cost, gain = [writer], tables.price[writer], self._gain(writer, end, stage)
        length = (end - self.stages.before(storage, end)) ** self.taste.length
        if self.taste.noise:
            length *= self.taste.noise(storage)
        open_ = self._missing(writer, end, found)
        best: Closure | None = None
        while True:
            net = gain - sum(sizes[s] for s in open_ if self.stages.before(s, end) < stage)
            if net > 0:
                score = cost / (net ** self.taste.size * length)
                if best is None or score < best.score:
                    best = Closure(score, tuple(found))
            victim = min((s for s in open_ if self._may_return(s, end)), default=None,
                         key=lambda s: (tables.price[tables.writer[s]] / sizes[s] if sizes[s] else 1e99, s))
            if victim is None or len(found) >= _LONGEST:
                return best
            position = tables.writer[victim]
            cost += self._price(victim, position, end)
            found.append(position)
            open_ -= set(tables.again_writes[position])
            open_ |= self._missing(position, end, found)

    def _gain(self, writer: int, end: int, stage: int) -> int:
        """Bytes gone in ``stage`` if ``writer`` repeats in ``end``."""
        gain = 0
        for storage in self.tables.again_writes[writer]:
            waits = self._waits(storage, stage)
            if waits >= end and (waits == end or self.stages.alive(storage, end)):
                gain += self.tables.sizes[storage]
        return gain

    def _missing(self, position: int, end: int, found: list[int]) -> set[int]:
        """What a repeat of ``position`` in ``end`` reads that is not there."""
        return {s for s in self.tables.again_reads[position]
                if self.tables.writer[s] not in found and not self.stages.alive(s, end)}

    def _may_return(self, storage: int, end: int) -> bool:
        writer = self.tables.writer[storage]
        return storage in self.tables.recoverable and storage not in self.kept and end >= self.tables.earliest[writer]

    def _price(self, storage: int, position: int, end: int) -> float:
        """Nothing, if it comes back later anyway and may as well come now."""
        later = self._next_birth(storage, end)
        if later is not None and position in self.stages.repeats[later] and self._room(storage, end, later):
            return 0.0
        return self.tables.price[position]

    def _squeeze(self, stage: int) -> int | None:
        """Nothing only waits: try what is touched in ``stage`` itself, but not all through it."""
        before, mark = self.stages.bytes_during[stage], len(self.stages.log)
        best: tuple[float, int, int] | None = None
        for target, position in self._squeezable(stage):
            self.stages.add(target, position)
            gain = before - self.stages.bytes_during[stage]
            self.stages.back(mark)
            if gain > 0:
                best = min(best or (1e99, 0, 0), (self.tables.price[position] / gain, target, position))
        if best is None:
            return None
        self.work += 1
        return self.stages.add(best[1], best[2])

    def _squeezable(self, stage: int) -> list[tuple[int, int]]:
        """Repeats in ``stage`` of what enters it, and later ones of what leaves it."""
        tables, stages = self.tables, self.stages
        found: set[tuple[int, int]] = set()
        touched = {*tables.first_reads[stage], *tables.first_writes[stage]}
        for position in stages.repeats[stage]:
            touched.update(tables.again_reads[position], tables.again_writes[position])
        for storage in touched & tables.recoverable - self.kept:
            position, touches = tables.writer[storage], stages.touches[storage]
            index = bisect_left(touches, stage + 1)
            if index < len(touches) and touches[index] not in stages.births[storage]:
                found.add((touches[index], position))
            if stage not in stages.births[storage]:
                found.add((stage, position))
        return sorted((t, p) for t, p in found if t >= tables.earliest[p])
