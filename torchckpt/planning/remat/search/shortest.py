"""Shortest: the fastest schedule of a tiny dataflow over all orders of its first runs, as a shortest path."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import combinations, count

from torchckpt.planning.remat.flow.dataflow import Tables

__all__ = ["Shortest"]


class Shortest:
    """Dijkstra's algorithm. A state has two bit masks: the operations that have run, and the storages that are alive.

    Dropping costs nothing, so storages are dropped only when an operation does not fit, and as few as possible. An edge
    costs what its repeat costs; a first run costs nothing. ``most_cost``: the search ends where the repeats of all
    paths left cost at least this. ``most_states``: the states to visit before the search gives up.
    """

    def __init__(self, tables: Tables, budget_bytes: int, most_cost: float, most_states: int) -> None:
        self.tables, self.budget_bytes = tables, budget_bytes
        self.most_cost, self.most_states = most_cost, most_states
        self.forward = (1 << tables.forward) - 1
        self.all = (1 << tables.count) - 1
        self.staying = _mask(tables.staying)
        self.first = [(_mask(r), _mask(w)) for r, w in zip(tables.first_reads, tables.first_writes)]
        self.again = [(_mask(r), _mask(w)) for r, w in zip(tables.repeat_reads, tables.repeat_writes)]
        self.results = [extra - tables.flow.operations[index].workspace_bytes
                        for extra, index in zip(tables.first_extra_bytes, tables.order)]
        self.needed = [_writers(tables, index) for index in tables.order]
        self.useful: dict[int, int] = {}
        self.sizes: dict[int, int] = {0: 0}

    def run(self) -> tuple[int, ...] | None:
        """The positions in the order in which they run; None if no schedule was found within the limits."""
        number = count()
        queue: list[tuple[float, int, int, int, int, tuple[int, ...]]] = [(0.0, 0, 0, 0, 0, ())]
        settled: dict[int, list[int]] = {}
        states = 0
        while queue:
            cost, _, _, done, alive, path = heappop(queue)
            if done == self.all:
                return path
            others = settled.setdefault(done, [])
            if any(not alive & ~other for other in others):
                continue
            others.append(alive)
            states += 1
            if states > self.most_states:
                return None
            for position in range(self.tables.count):
                again = done >> position & 1
                after_cost = cost + (self.tables.repeat_cost[position] if again else 0.0)
                if after_cost >= self.most_cost:
                    continue
                after = done | 1 << position
                for left in self._steps(done, alive, position):
                    heappush(queue, (after_cost, -after.bit_count(), next(number), after, left, (*path, position)))
        return None

    def _steps(self, done: int, alive: int, position: int) -> Iterator[int]:
        """The sets of storages that may be alive after ``position`` has run. None could be larger."""
        tables, in_backward = self.tables, done & self.forward == self.forward
        if done >> position & 1:
            (reads, writes), extra = self.again[position], tables.repeat_extra_bytes[position]
            arrived = tables.arrival < 0 or bool(done >> tables.arrival & 1)
            may_run = tables.repeatable[position] and (arrived if in_backward else not tables.earliest[position])
        else:
            (reads, writes), extra = self.first[position], tables.first_extra_bytes[position]
            may_run = not self.needed[position] & ~done and (in_backward or position < tables.forward)
        if reads & ~alive or not may_run:
            return
        extra += sum(bytes_ for other, bytes_ in enumerate(self.results) if done >> other & 1)
        after = done | 1 << position
        for left in self._fitting(alive | writes, reads | writes | (0 if in_backward else self.staying), extra):
            yield left & self._useful(after)

    def _fitting(self, alive: int, fixed: int, extra_bytes: int) -> Iterator[int]:
        """The largest subsets of ``alive`` that fit beside ``extra_bytes`` and have all of ``fixed``."""
        over = self._size(alive) + extra_bytes - self.budget_bytes
        if over <= 0:
            yield alive
            return
        loose = [1 << bit for bit in range(alive.bit_length()) if (alive & ~fixed) >> bit & 1]
        tried: list[int] = []
        for number in range(1, len(loose) + 1):
            for chosen in combinations(loose, number):
                dropped = sum(chosen)
                if self._size(dropped) >= over and not any(not less & ~dropped for less in tried):
                    tried.append(dropped)
                    yield alive & ~dropped

    def _size(self, mask: int) -> int:
        if mask not in self.sizes:
            low = mask & -mask
            self.sizes[mask] = self._size(mask ^ low) + self.tables.sizes[low.bit_length() - 1]
        return self.sizes[mask]

    def _useful(self, done: int) -> int:
        """The storages that are read by an operation that has yet to run, or by a repeat for it."""
        if done not in self.useful:
            useful = 0 if done & self.forward == self.forward else self.staying
            wanted = [s for p, reads in enumerate(self.tables.first_reads) if not done >> p & 1 for s in reads]
            while wanted:
                storage = wanted.pop()
                if not useful >> storage & 1:
                    useful |= 1 << storage
                    writer = self.tables.writer[storage]
                    if done >> writer & 1 and storage in self.tables.recoverable:
                        wanted.extend(self.tables.repeat_reads[writer])
            self.useful[done] = useful
        return self.useful[done]


def _writers(tables: Tables, index: int) -> int:
    """The positions that have to run before an operation, since they write results that it reads."""
    flow = tables.flow
    writers = {flow.writer[storage] for storage in flow.operations[index].reads if storage in flow.results}
    return _mask(position for position, other in enumerate(tables.order) if other in writers)


def _mask(bits: Iterable[int]) -> int:
    return sum(1 << bit for bit in bits)
