"""Eviction: add repeats until a schedule fits its budget; first those with the lowest cost for the memory they free."""
from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from torchckpt.planning.remat.flow.incremental import Draft

__all__ = ["Eviction", "EvictionScore"]

_LONGEST = 64
"""The most operations that one eviction repeats; later evictions may add more."""

_WORK = 40
"""The work per operation after which a sweep gives up, since repeats only lead to more repeats."""


@dataclass(frozen=True)
class EvictionScore:
    """The score of a storage to drop; the lowest is best: seconds of the repeat / (bytes**size * positions**length).

    The positions are those at which it is gone. Belady (1966) evicts what is needed last; DTR (Kirisame et al.,
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


_Closure: TypeAlias = tuple[float, tuple[int, ...]]
"""The score of a storage for the position that is over the budget, and the repeats that recompute it."""


class Eviction:
    """Sweeps over the positions. Where memory is over the budget, storages that are alive and not touched are dropped.

    A dropped storage is recomputed at its next use. The storages that this repeat reads stay alive until then, or are
    recomputed too if that scores better. A later position of the sweep may drop them, too.
    """

    def __init__(
        self, draft: Draft, budget_bytes: int, scoring: EvictionScore, kept: frozenset[int] = frozenset()
    ) -> None:
        self.draft, self.tables = draft, draft.tables
        self.budget_bytes, self.scoring = budget_bytes, scoring
        self.kept = kept if scoring.gradients else kept | self.tables.gradients
        self.heap: list[tuple[float, int, int]] = []
        self.put_off: set[int] = set()

    def run(self, most_cost: float = math.inf) -> bool:
        """Add repeats until the schedule fits; whether it does. Gives up beyond ``most_cost``, or after much work."""
        draft, during, budget = self.draft, self.draft.during, self.budget_bytes
        fits, hopeless = True, -1
        most_work = draft.work + _WORK * (self.tables.count + 100)
        position = during.over(0, budget)
        self._scan(position)
        while position < self.tables.count:
            if draft.cost > most_cost or draft.work > most_work:
                return False
            self.put_off = set()
            low = self._evict(position)
            if low is None:
                fits, hopeless = False, position
            elif low < position and during.most(max(low, hopeless + 1), position) > budget:
                position = during.over(max(low, hopeless + 1), budget)
                self._scan(position)
            if during.at(position) <= budget or position == hopeless:
                passed, position = position, during.over(position + 1, budget)
                self._pass(passed, position)
        return fits and draft.peak_bytes <= budget

    def _scan(self, position: int) -> None:
        """Fill the heap with the storages that wait across ``position``: alive in it, but not touched by it."""
        self.heap = []
        if position < self.tables.count:
            entries = (self._entry(storage, position) for storage in self.tables.recoverable)
            self.heap = [entry for entry in entries if entry is not None]
            heapify(self.heap)

    def _pass(self, passed: int, position: int) -> None:
        """Add to the heap the storages touched from ``passed`` up to ``position``, which may wait across it."""
        tables = self.tables
        if position == tables.count:
            return
        touched: set[int] = set()
        for between in range(passed, position):
            touched.update(tables.first_touches[between])
            for repeated in self.draft.repeats[between]:
                touched.update(tables.repeat_reads[repeated], tables.repeat_writes[repeated])
        for storage in touched & tables.recoverable:
            self._push(storage, position)

    def _push(self, storage: int, position: int) -> None:
        entry = self._entry(storage, position)
        if entry is not None:
            heappush(self.heap, entry)

    def _entry(self, storage: int, position: int) -> tuple[float, int, int] | None:
        end = self._waits(storage, position)
        if end < 0 or storage in self.kept:
            return None
        closure = self._closure(storage, end, position)
        return None if closure is None else (closure[0], storage, end)

    def _waits(self, storage: int, position: int) -> int:
        """The position that next touches ``storage``, if it waits across ``position``; else -1."""
        touches = self.draft.touches[storage]
        index = bisect_left(touches, position)
        if index in (0, len(touches)):
            return -1
        end = touches[index]
        return -1 if end == position or end in self.draft.births[storage] else end

    def _evict(self, position: int) -> int | None:
        """Drop the best storage. Returns the first position whose memory changed, or None if nothing can be dropped."""
        while self.heap:
            score, storage, end = heappop(self.heap)
            now = self._waits(storage, position)
            if now < 0:
                continue
            closure = self._closure(storage, now, position)
            if closure is None:
                continue
            new_score, repeats = closure
            stale = new_score > score * 1.0001 or now != end
            if stale and storage not in self.put_off and self.heap and new_score > self.heap[0][0]:
                heappush(self.heap, (new_score, storage, now))
                continue
            before, mark = self.draft.during.at(now), len(self.draft.log)
            low = self._apply(repeats, now, position)
            if storage in self.put_off or self.draft.during.at(now) <= max(before, self.budget_bytes):
                return low
            self.draft.back(mark)
            self.put_off.add(storage)
            heappush(self.heap, (new_score * self.scoring.put_off, storage, now))
        return self._squeeze(position)

    def _apply(self, repeats: tuple[int, ...], end: int, position: int) -> int:
        low = self.draft.add(end, *repeats)
        self._bring_forward(end, repeats)
        reads = {storage for repeated in repeats for storage in self.tables.repeat_reads[repeated]}
        for storage in reads & self.tables.recoverable:
            self._push(storage, position)
        return low

    def _bring_forward(self, position: int, repeats: tuple[int, ...]) -> None:
        """Remove later ones of ``repeats`` where there is room to keep what ``position`` now recomputes."""
        draft, last = self.draft, position
        spared: set[tuple[int, int, bool]] = set()
        for repeated in repeats:
            for storage in self.tables.repeat_writes[repeated]:
                later = self._next_birth(storage, position)
                if later is not None and repeated in draft.repeats[later] and self._room(storage, position, later):
                    spared.add((later, repeated, False))
                    last = max(last, later)
        mark = len(draft.log)
        while spared:
            low = draft.change(sorted(spared))
            if draft.during.most(max(low, position), last + 1) <= self.budget_bytes:
                return
            draft.back(mark)
            spared = set(sorted(spared)[: len(spared) // 2])

    def _next_birth(self, storage: int, position: int) -> int | None:
        touches = self.draft.touches[storage]
        index = bisect_left(touches, position + 1)
        return touches[index] if index < len(touches) and touches[index] in self.draft.births[storage] else None

    def _room(self, storage: int, position: int, later: int) -> bool:
        room = self.budget_bytes - self.tables.sizes[storage]
        return self.draft.during.most(position + 1, later) <= room

    def _closure(self, storage: int, end: int, position: int) -> _Closure | None:
        """The repeats at ``end`` of the best score that recompute ``storage``, so that it can be gone at ``position``.

        A storage that a repeat reads, and that would be dead by then, is kept alive (maybe across ``position``) or
        recomputed, too.
        """
        tables = self.tables
        writer = tables.writer[storage]
        self.draft.work += 1
        if end < tables.earliest[writer]:
            return None
        repeats, cost, gain = [writer], tables.repeat_cost[writer], self._gain(writer, end, position)
        if gain <= 0:  # all its storages are empty
            return None
        power = self.scoring.size
        value = (end - self.draft.before(storage, end)) ** self.scoring.length
        if self.scoring.noise:
            value *= self.scoring.noise(storage)
        prices: dict[int, float] = {}  # by storage that repeats keep alive, the seconds a byte of recomputing it
        net = gain - self._keep_alive(writer, end, position, prices, repeats)
        best, number = 1e300, 0
        while True:
            if net > 0 and cost / (net ** power * value) < best:
                best, number = cost / (net ** power * value), len(repeats)
            if not prices or len(repeats) >= _LONGEST or cost / (gain ** power * value) >= best:
                break
            victim = min(prices, key=prices.__getitem__)
            if prices[victim] == math.inf:
                break
            repeated = tables.writer[victim]
            cost += self._price(victim, repeated, end)
            repeats.append(repeated)
            for output in tables.repeat_writes[repeated]:
                if prices.pop(output, None) is not None:
                    net += tables.sizes[output]
            net -= self._keep_alive(repeated, end, position, prices, repeats)
        return (best, tuple(repeats[:number])) if number else None

    def _keep_alive(self, repeated: int, end: int, position: int, prices: dict[int, float], repeats: list[int]) -> int:
        """Add to ``prices`` what a repeat at ``end`` keeps alive across ``position``. Returns the bytes of that."""
        tables, more = self.tables, 0
        for storage in tables.repeat_reads[repeated]:
            touches = self.draft.touches[storage]
            index = bisect_left(touches, end)
            if index < len(touches) and (touches[index] == end or touches[index] not in self.draft.births[storage]):
                continue
            writer = tables.writer[storage]
            if storage in prices or writer in repeats or touches[index - 1] >= position:
                continue
            size = tables.sizes[storage]
            more += size
            may = storage in tables.recoverable and storage not in self.kept and end >= tables.earliest[writer]
            prices[storage] = tables.repeat_cost[writer] / size if may and size else math.inf
        return more

    def _gain(self, writer: int, end: int, position: int) -> int:
        """The bytes freed at ``position`` if ``writer`` is repeated at ``end``."""
        gain = 0
        for storage in self.tables.repeat_writes[writer]:
            waits = self._waits(storage, position)
            if waits >= end and (waits == end or self.draft.alive(storage, end)):
                gain += self.tables.sizes[storage]
        return gain

    def _price(self, storage: int, position: int, end: int) -> float:
        """The cost of a repeat of ``position`` at ``end``; 0 if it replaces a later repeat."""
        later = self._next_birth(storage, end)
        if later is not None and position in self.draft.repeats[later] and self._room(storage, end, later):
            return 0.0
        return self.tables.repeat_cost[position]

    def _squeeze(self, position: int) -> int | None:
        """Drop a storage that ``position`` itself touches, but does not need from its start to its end."""
        before, mark = self.draft.during.at(position), len(self.draft.log)
        for target, repeated in self._squeezable(position):
            low = self.draft.add(target, repeated)
            if self.draft.during.at(position) < before:
                return low
            self.draft.back(mark)
        return None

    def _squeezable(self, position: int) -> list[tuple[int, int]]:
        """What could be repeated where to lower the memory of ``position``, the cheapest per byte first.

        A storage that is alive before ``position`` is repeated at it; one that is alive after it, at its next use.
        """
        tables, draft = self.tables, self.draft
        places: set[tuple[int, int]] = set()
        touched = set(tables.first_touches[position])
        for repeated in draft.repeats[position]:
            touched.update(tables.repeat_reads[repeated], tables.repeat_writes[repeated])
        for storage in touched & tables.recoverable - self.kept:
            repeated, touches = tables.writer[storage], draft.touches[storage]
            index = bisect_left(touches, position + 1)
            if index < len(touches) and touches[index] not in draft.births[storage]:
                places.add((touches[index], repeated))
            if position not in draft.births[storage]:
                places.add((position, repeated))
        allowed = [(t, p) for t, p in places if t >= tables.earliest[p] and p not in draft.repeats[t]]
        sizes = {p: sum(tables.sizes[storage] for storage in tables.repeat_writes[p]) or 1e-9 for _, p in allowed}
        return sorted(allowed, key=lambda repeat: (tables.repeat_cost[repeat[1]] / sizes[repeat[1]], repeat))
