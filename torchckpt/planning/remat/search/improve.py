"""Improve: the moves from one schedule to a better one: fewer repeats, other orders of first runs, other repeats."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from heapq import heappop, heappush
from random import Random

from torchckpt.planning.remat.flow.dataflow import Dataflow, Schedule, Tables, placed_repeats
from torchckpt.planning.remat.flow.incremental import Draft
from torchckpt.planning.remat.flow.memory import simulate
from torchckpt.planning.remat.search.eviction import Eviction, EvictionScore

__all__ = ["RuinAndRecreate", "draft_of", "hoisted", "moved", "prune", "remove_repeats", "transplanted"]

_SLACK = 1.15
"""The most that a new schedule may cost before it is pruned, as a multiple of the current cost."""
_WARMTH = 0.03
"""How much slower than the best schedule an accepted one may be at the start of the search."""
_LOWER = 0.97
"""The next target for a schedule that does not fit, as a share of its peak."""
_PATIENCE = 8
"""How many rounds in vain end the search, for each operation: small schedules are at their best long before."""


def remove_repeats(flow: Dataflow, schedule: Schedule, budget_bytes: int) -> Schedule:
    """``schedule`` with as many repeats removed as fits in ``budget_bytes``, the slowest repeats first.

    A schedule over the budget is returned unchanged. The result is at most as slow as ``schedule``, and fits the
    budget if ``schedule`` does.
    """
    draft = draft_of(flow, schedule)
    bare = Draft(draft.tables)
    if bare.peak_bytes <= budget_bytes:
        draft = bare
    if draft.peak_bytes > budget_bytes:
        return schedule
    while prune(draft, budget_bytes):
        pass
    pruned = draft.schedule()
    return pruned if len(pruned) < len(schedule) else schedule


def draft_of(flow: Dataflow, schedule: Schedule, pinned: Set[int] = frozenset()) -> Draft:
    """``schedule`` as a draft: repeats are sorted and distinct at each position, and none writes a pinned storage."""
    simulate(flow, schedule)
    tables = Tables(flow, pinned, list(dict.fromkeys(schedule)))
    draft = Draft(tables)
    for position, repeated in placed_repeats(schedule, tables.order):
        may = position < tables.count and tables.may_repeat(repeated, position)
        if may and repeated not in draft.repeats[position]:
            draft.add(position, repeated)
    return draft


def prune(draft: Draft, budget_bytes: int) -> bool:
    """Remove the repeats that the budget has room to do without, the slowest first. True if any was removed."""
    cost, pruned = draft.tables.repeat_cost, False
    for position, repeated in sorted(draft.all_repeats(), key=lambda repeat: (-cost[repeat[1]], repeat)):
        if repeated in draft.repeats[position] and _spare(draft, position, repeated, budget_bytes):
            pruned = True
            _sweep_useless(draft, position, repeated)
    return pruned


def _spare(draft: Draft, position: int, repeated: int, budget_bytes: int) -> bool:
    """Remove one repeat if the schedule then still fits the budget; whether it was removed."""
    tables, during = draft.tables, draft.during
    limit = budget_bytes + sum(tables.sizes[s] for s in tables.repeat_reads[repeated] if draft.waits_for(s, position))
    for storage in tables.repeat_writes[repeated]:
        before = draft.before(storage, position)
        if position - before > 1 and draft.alive_after(storage, position) and (
            during.most(before + 1, position) + tables.sizes[storage] > limit
        ):
            return False
    mark = len(draft.log)
    low = draft.remove(position, repeated)
    if during.most(low, position + 1) <= budget_bytes:
        return True
    draft.back(mark)
    return False


def _sweep_useless(draft: Draft, position: int, repeated: int) -> None:
    """Remove the repeats that only this removed repeat needed."""
    tables = draft.tables
    for storage in tables.repeat_reads[repeated]:
        writer = tables.writer[storage]
        birth = draft.before(storage, position + 1)
        is_read = (draft.alive_after(written, birth) for written in tables.repeat_writes[writer])
        if writer in draft.repeats[birth] and not any(is_read):
            draft.remove(birth, writer)
            _sweep_useless(draft, birth, writer)


def hoisted(flow: Dataflow, sink: bool = False) -> list[int]:
    """The eager order, but each operation that frees more than it allocates runs as soon as its inputs are ready.

    This helps gradients of weights most. Each is the last reader of a saved value. Autograd runs it after the gradient
    of the input, which is allocated while that value is still alive. The forward stays before the backward. ``sink``:
    always run the ready operation that frees most. Default: False; if no operation frees memory, run the next one of
    the eager order.
    """
    return _Hoist(flow, sink).run()


class _Hoist:
    def __init__(self, flow: Dataflow, sink: bool) -> None:
        self.flow, self.sink = flow, sink
        self.kept = flow.given | flow.results | flow.forward_results
        self.left = Counter(s for operation in flow.operations for s in operation.reads)
        self.missing = [sum(s not in flow.given for s in operation.reads) for operation in flow.operations]
        self.done: set[int] = set()
        self.heap: list[tuple[int, int]] = []
        self.order: list[int] = []

    def run(self) -> list[int]:
        forward, count = self.flow.forward, len(self.flow.operations)
        for first, end in ((0, forward), (forward, count)):
            self.end, self.heap = end, []
            for index in range(first, end):
                self._offer(index)
            for index in range(first, end):
                self._drain()
                if index not in self.done:
                    self._take(index)
            self._drain()
        return self.order

    def _drain(self) -> None:
        """Run the ready operations that free more than they allocate."""
        while self.heap:
            change, index = self.heap[0]
            if index in self.done or change != self._change(index):
                heappop(self.heap)
                self._offer(index)
            elif self.sink or change < 0:
                heappop(self.heap)
                self._take(index)
            else:
                return

    def _offer(self, index: int) -> None:
        if index < self.end and index not in self.done and not self.missing[index]:
            heappush(self.heap, (self._change(index), index))

    def _change(self, index: int) -> int:
        """The bytes that the operation allocates, less those that die after it."""
        operation, sizes = self.flow.operations[index], self.flow.sizes_bytes
        dies = sum(sizes[s] for s in operation.reads if self.left[s] == 1 and s not in self.kept)
        return sum(sizes[s] for s in operation.writes) - dies

    def _take(self, index: int) -> None:
        self.done.add(index)
        self.order.append(index)
        operation, readers = self.flow.operations[index], self.flow.readers
        self.left.subtract(operation.reads)
        for storage in operation.writes:
            for reader in readers.get(storage, ()):
                self.missing[reader] -= 1
                self._offer(reader)
        for storage in operation.reads:
            if self.left[storage] == 1:
                for reader in readers[storage]:
                    self._offer(reader)


def transplanted(draft: Draft, tables: Tables) -> Draft:
    """``draft`` with its first runs in the order of ``tables``; repeats stay before the first runs that they are made
    for."""
    place = {index: position for position, index in enumerate(tables.order)}
    places = [place[index] for index in draft.tables.order]
    other = Draft(tables)
    for position, repeats in zip(places, draft.repeats):
        for repeated in (places[old] for old in repeats):
            if position > repeated and tables.may_repeat(repeated, position):
                other.add(position, repeated)
    return other


def moved(flow: Dataflow, order: list[int]) -> Iterator[list[int]]:
    """Every order in which one operation is moved as early, or as late, as its reads, readers and boundary allow."""
    place = {index: position for position, index in enumerate(order)}
    readers = flow.readers
    for position, index in enumerate(order):
        operation = flow.operations[index]
        first, end = (0, flow.forward) if position < flow.forward else (flow.forward, len(order))
        early = max([first, *(place[flow.writer[s]] + 1 for s in operation.reads if s not in flow.given)])
        late = min([end, *(place[reader] for s in operation.writes for reader in readers.get(s, ()))]) - 1
        rest = order[:position] + order[position + 1:]
        for target in {early, late} - {position}:
            yield rest[:target] + [index] + rest[target:]


class RuinAndRecreate:
    """The local search of Schrimpf et al. (2000), on the repeats of a schedule.

    Each round removes some repeats. Evictions then add others until the schedule fits its budget again. Faster
    schedules are kept; at first also those a little slower than the best. The search is limited by counted work, and
    not by time, so its result is the same on every machine.
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
        end, in_vain = draft.work + work, 0
        while draft.work < end and any(draft.repeats) and in_vain < _PATIENCE * self.tables.count:
            draft.work += 10
            best_cost = self.best_cost
            self._round(_WARMTH * (end - draft.work) / work)
            in_vain = 0 if self.best_cost < best_cost else in_vain + 1
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
        random, repeats = self.random, self.draft.all_repeats()
        kind = random.randrange(4)
        if kind == 3:
            self._disturb()
            return set()
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

    def _disturb(self) -> None:
        """Add repeats at random, and remove those that they make unnecessary."""
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
