"""Brute force: the fastest of all schedules within a budget, found by trying them. It shares no code with the planner.

A state is which operations have run, and which storages are alive. Dropping costs nothing, so an operation is run with
as much left alive as fits: of the sets that could be dropped for it, only those are tried of which no storage could
stay. Seconds of first runs are the same in every schedule; Dijkstra's algorithm counts those of repeats.

It can be narrowed down to the orders that a solver is limited to.
"""
from __future__ import annotations

from heapq import heappop, heappush
from itertools import combinations, count
from typing import NamedTuple

from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation


class State(NamedTuple):
    """``copied``: the results of the forward of which the newest copy is not the first, which must stay there."""

    done: frozenset[int] = frozenset()
    alive: frozenset[int] = frozenset()
    copied: frozenset[int] = frozenset()
    position: int = -1


class Search:
    def __init__(self, flow: Dataflow, budget_bytes: int, ordered: bool) -> None:
        self.flow, self.budget_bytes, self.ordered = flow, budget_bytes, ordered
        self.forward = frozenset(range(flow.forward))
        self.staying = flow.forward_results - flow.results
        self.of_use: dict[frozenset[int], frozenset[int]] = {}

    def run(self) -> tuple[float, list[int]] | None:
        number = count()
        queue = [(0.0, 0, next(number), State(), None)]
        settled: dict[object, list[frozenset[int]]] = {}
        while queue:
            seconds, _, _, state, path = heappop(queue)
            if len(state.done) == len(self.flow.operations):
                return self.flow.seconds + seconds, unwound(path)
            others = settled.setdefault(state._replace(alive=None), [])
            if any(state.alive <= other for other in others):
                continue
            others.append(state.alive)
            for index in range(len(self.flow.operations)):
                again = index in state.done
                more = self.flow.operations[index].repeat.seconds if again else 0.0
                for after in self.steps(state, index, again):
                    heappush(queue, (seconds + more, -len(after.done), next(number), after, (index, path)))
        return None

    def steps(self, state: State, index: int, again: bool):
        """The states after ``index`` has run in ``state``."""
        operation = self.flow.operations[index]
        if not (self.may_repeat(state, index) if again else self.may_start(state, index)):
            return
        runs = operation.repeat if again else operation
        if not set(runs.reads) <= state.alive | self.flow.given:
            return
        for alive in self.fitting(state, runs, again):
            yield self.after(state, alive, index, runs, again)

    def may_start(self, state: State, index: int) -> bool:
        if self.ordered and index != len(state.done):
            return False
        return index in self.forward or self.forward <= state.done

    def may_repeat(self, state: State, index: int) -> bool:
        if self.ordered and (index <= state.position or self.copies(state, index)):
            return False
        return self.flow.operations[index].repeatable

    def copies(self, state: State, index: int) -> bool:
        """Whether a repeat of ``index`` would write a result of the forward a second time before the forward ends."""
        return not self.forward <= state.done and bool(self.staying & set(self.flow.operations[index].repeat.writes))

    def pinned(self, state: State) -> frozenset[int]:
        """What must stay alive: results; those of the forward, while it runs, unless another copy is newer."""
        if self.forward <= state.done:
            return self.flow.results
        return self.flow.results | (self.flow.forward_results - state.copied)

    def fitting(self, state: State, runs: Operation, again: bool):
        """What may be left alive, no more of which could, while ``runs`` runs; what it writes included."""
        size = self.flow.sizes_bytes
        extra = runs.workspace_bytes
        if not self.forward <= state.done:
            extra += sum(size[storage] for storage in state.copied)
        if again:
            extra += sum(size[storage] for storage in runs.writes if storage in self.pinned(state))
        base = state.alive.union(runs.writes)
        over = sum(size[storage] for storage in base) + extra - self.budget_bytes
        fixed = self.pinned(state).union(runs.reads, runs.writes)
        loose = sorted(base - fixed, key=size.__getitem__)
        for number in range(len(loose) + 1):
            if number and sum(size[storage] for storage in loose[: number - 1]) >= over:
                return  # any so many less one are enough
            for dropped in combinations(loose, number):
                sizes = [size[storage] for storage in dropped]
                if sum(sizes) >= over > sum(sizes[1:]) or (not sizes and over <= 0):
                    yield base.difference(dropped)

    def after(self, state: State, alive: frozenset[int], index: int, runs: Operation, again: bool) -> State:
        done, copied = state.done | {index}, state.copied
        if again:
            copied |= self.pinned(state) & self.staying & set(runs.writes)
        if self.forward <= done:
            copied = frozenset()
        position = index if self.ordered and again else -1
        after = State(done, alive, copied, position)
        return after._replace(alive=alive & (self.useful(done) | self.pinned(after)))

    def useful(self, done: frozenset[int]) -> frozenset[int]:
        """What an operation reads that has still to run, or a repeat for it."""
        if done not in self.of_use:
            operations = self.flow.operations
            useful: set[int] = set()
            wanted = [storage for index in range(len(operations)) if index not in done
                      for storage in operations[index].reads]
            while wanted:
                storage = wanted.pop()
                if storage not in useful:
                    useful.add(storage)
                    for index in done:
                        if operations[index].repeatable and storage in operations[index].repeat.writes:
                            wanted.extend(operations[index].repeat.reads)
            self.of_use[done] = frozenset(useful)
        return self.of_use[done]


def unwound(path) -> list[int]:
    schedule = []
    while path is not None:
        index, path = path
        schedule.append(index)
    return schedule[::-1]


def fastest(flow: Dataflow, budget_bytes: int, *, ordered: bool = False) -> tuple[float, list[int]] | None:
    """The seconds of the fastest schedule within the budget, and one that takes them; none if none fits.

    Args:
        ordered: first runs in the order of the dataflow, repeats between two of them in ascending order; and no repeat
            of an operation in the forward, if it writes results of the forward.
    """
    return Search(flow, budget_bytes, ordered).run()
