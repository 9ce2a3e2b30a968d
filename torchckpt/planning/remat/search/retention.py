"""Retention: an integer programme of what is repeated at each position, and which storages wait for the next one.

Position t has the t-th first run and, before it, its repeats, in ascending order. Two kinds of decisions, as in
Checkmate (Jain et al., 2020):

    R[t,p]   the first run of position p is repeated at position t
    S[t,v]   storage v waits from position t-1 for position t

and their constraints, where position w(v) writes v:

    [1] a first run in t reads v                S[t,v] + R[t,w(v)] >= 1
    [2] a repeat of p in t reads v              S[t,v] + R[t,w(v)] >= R[t,p]
    [3] v was alive before it waits             S[t,v] + R[t,w(v)] >= S[t+1,v]
    [4] at every run, what is alive fits: its outputs, and what waits or is read by this run or a later one of t
    [5] before a use of v at position T, v waits in t, or an input u of w(v) does, or u is repeated from t to T:
                                                S[t,v] + S[t,u] + R[t,w(u)] + ... + R[T,w(u)] >= 1

For whole numbers, [5] follows from the others. Without it, the linear relaxation repeats a tenth of w(v) at each of ten
positions, and a tenth of u that waits is enough for all of them. That gives useless bounds: 0.6 % of the step where 12
% are needed. With [5], the optimum of steps of some sixty operations is proven in seconds.
"""
from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from torchckpt.planning.remat.flow.dataflow import Schedule, Tables

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver, IntVar

__all__ = ["Retention"]

Literal: TypeAlias = "IntVar | bool"

DEPTH = 3
"""How far back [5] goes: the inputs of v, their inputs, and so on."""


class Retention:
    """The integer programme for the step of ``tables``.

    Args:
        model: an empty model, which gets variables and constraints, but no objective.
        most_repeats: the most repeats of one operation; None for any number.
        hint: a schedule that meets the constraints, from which the solver starts.
    """

    def __init__(
        self, model: CpModel, tables: Tables, budget_bytes: int, most_repeats: int | None, hint: Schedule | None
    ) -> None:
        self.model, self.tables, self.budget_bytes = model, tables, budget_bytes
        self.hinted: dict[int, bool] | None = None if hint is None else {}
        hinted, waiting = ([], []) if hint is None else _trace(tables, hint)
        self.readers = _readers(tables)
        useful = self._useful()
        self.repeats = {
            (position, repeated): self._flag(bool(hinted) and repeated in hinted[position])
            for repeated in range(tables.count)
            for position in range(repeated + 1, useful[repeated] + 1)
            if tables.may_repeat(repeated, position)
        }
        self.waits = {
            (position, storage): self._flag(bool(waiting) and storage in waiting[position])
            for storage, writer in tables.writer.items()
            for position in range(writer + 1, max(self._last_use(storage, useful), self._held_until(storage)) + 1)
        }
        self._hold()
        self._provide()
        self._fit()
        self._cut()
        if most_repeats is not None:
            self._limit(most_repeats)

    def schedule(self, solver: CpSolver) -> Schedule:
        order = self.tables.order
        repeats: list[list[int]] = [[] for _ in order]
        for (position, repeated), flag in self.repeats.items():
            if solver.boolean_value(flag):
                repeats[position].append(repeated)
        return tuple(order[p] for position, before in enumerate(repeats) for p in (*sorted(before), position))

    # variables

    def _flag(self, hinted: bool) -> IntVar:
        flag = self.model.new_bool_var("")
        if self.hinted is not None:
            self.hinted[flag.index] = hinted
            self.model.add_hint(flag, hinted)
        return flag

    def _either(self, one: Literal, other: Literal) -> Literal:
        """A literal that is true if one of these is."""
        if isinstance(one, bool):
            return one or other
        if isinstance(other, bool):
            return other or one
        flag = self._flag(self.hinted is not None and (self.hinted[one.index] or self.hinted[other.index]))
        self.model.add_implication(one, flag)
        self.model.add_implication(other, flag)
        return flag

    def _useful(self) -> list[int]:
        """For each position, the last one at which its repeat can have a reader."""
        tables = self.tables
        useful = [-1] * tables.count
        for position in range(tables.count - 1, -1, -1):
            if tables.repeatable[position]:
                uses = (self._last_use(storage, useful) for storage in tables.repeat_writes[position])
                useful[position] = max(uses, default=-1)
        return useful

    def _last_use(self, storage: int, useful: list[int]) -> int:
        tables = self.tables
        first = max((p for p in self.readers[storage] if storage in tables.first_reads[p]), default=-1)
        again = max((useful[p] for p in self.readers[storage] if storage in tables.repeat_reads[p]), default=-1)
        return max(first, again)

    def _held_until(self, storage: int) -> int:
        return self.tables.forward - 1 if storage in self.tables.held else -1

    # constraints

    def _hold(self) -> None:
        for (position, storage), flag in self.waits.items():
            if position <= self._held_until(storage):
                self.model.add(flag == 1)

    def _present(self, storage: int, position: int) -> list[Literal]:
        """The literals one of which is true if runs at ``position`` can read ``storage``: it waits, or is written."""
        writer = self.tables.writer[storage]
        found: list[Literal] = [True] if writer == position else []
        if (position, storage) in self.waits:
            found.append(self.waits[position, storage])
        if (position, writer) in self.repeats and storage in self.tables.repeat_writes[writer]:
            found.append(self.repeats[position, writer])
        return found

    def _provide(self) -> None:
        tables = self.tables
        for position in range(tables.count):
            for storage in tables.first_reads[position]:
                self._need(storage, position)  # [1]
        for (position, repeated), flag in self.repeats.items():
            for storage in tables.repeat_reads[repeated]:
                self._need(storage, position, flag)  # [2]
        for (position, storage), flag in self.waits.items():
            self._need(storage, position - 1, flag)  # [3]

    def _need(self, storage: int, position: int, condition: IntVar | None = None) -> None:
        present = self._present(storage, position)
        if not any(literal is True for literal in present):
            clause = self.model.add_bool_or(present)
            if condition is not None:
                clause.only_enforce_if(condition)

    def _fit(self) -> None:
        """[4]"""
        tables = self.tables
        for position in range(tables.count):
            runs = [repeated for repeated in range(position) if (position, repeated) in self.repeats] + [position]
            alive: dict[int, list[tuple[int, Literal]]] = defaultdict(list)
            for storage, writer in tables.writer.items():
                if writer <= position and self._present(storage, position):
                    for repeated, literal in self._alive(storage, position, runs):
                        alive[repeated].append((tables.sizes[storage], literal))
            for repeated in runs[:-1]:
                extra = (tables.repeat_extra_bytes[repeated], self.repeats[position, repeated])
                self._within(self.budget_bytes - tables.floor_bytes[position], [*alive[repeated], extra])
            room = self.budget_bytes - tables.floor_bytes[position] - tables.first_extra_bytes[position]
            self._within(room, alive[position])

    def _alive(self, storage: int, position: int, runs: list[int]) -> Iterator[tuple[int, Literal]]:
        """For each run that may be at ``position``, the last first, what it runs, and whether ``storage`` is alive."""
        tables, writer = self.tables, self.tables.writer[storage]
        alive: Literal = position == self._held_until(storage) or self.waits.get((position + 1, storage), False)
        for repeated in reversed(runs):
            if repeated < writer:
                alive = self.waits.get((position, storage), False)
            elif repeated == position:
                alive = True if storage in tables.first_touches[position] else alive
            elif storage in tables.repeat_reads[repeated] or storage in tables.repeat_writes[repeated]:
                alive = self._either(alive, self.repeats[position, repeated])
            yield repeated, alive

    def _within(self, room_bytes: int, terms: Iterable[tuple[int, Literal]]) -> None:
        fixed = sum(size for size, literal in terms if literal is True)
        free = [(size, literal) for size, literal in terms if size and not isinstance(literal, bool)]
        if sum(size for size, _ in free) + fixed > room_bytes:
            self.model.add(sum(size * literal for size, literal in free) <= room_bytes - fixed)

    def _cut(self) -> None:
        """[5], for each storage, each position at which it may wait, and the next first run that reads it."""
        for storage, writer in self.tables.writer.items():
            uses = [repeated for repeated in self.readers[storage] if storage in self.tables.first_reads[repeated]]
            for position in range(writer + 1, max(uses, default=-1) + 1):
                use = uses[bisect_left(uses, position)]
                self._cut_back(position, use, storage, [self.waits[position, storage]])

    def _cut_back(self, position: int, use: int, storage: int, waiting: list[IntVar]) -> None:
        tables, writer = self.tables, self.tables.writer[storage]
        spans = range(position, use + 1) if storage in tables.repeat_writes[writer] else range(0)
        repeats = [self.repeats[t, writer] for t in spans if (t, writer) in self.repeats]
        self.model.add_bool_or([*waiting, *repeats])
        if repeats and len(waiting) <= DEPTH:
            for read in tables.repeat_reads[writer]:
                if (position, read) in self.waits:
                    self._cut_back(position, use, read, [*waiting, self.waits[position, read]])

    def _limit(self, most_repeats: int) -> None:
        flags: dict[int, list[IntVar]] = defaultdict(list)
        for (_, position), flag in self.repeats.items():
            flags[position].append(flag)
        for of_one in flags.values():
            self.model.add(sum(of_one) <= most_repeats)


def _readers(tables: Tables) -> dict[int, list[int]]:
    """For each storage, the positions whose first run or repeat reads it, in ascending order."""
    readers: dict[int, list[int]] = defaultdict(list)
    for position in range(tables.count):
        for storage in {*tables.first_reads[position], *tables.repeat_reads[position]}:
            readers[storage].append(position)
    return readers


def _trace(tables: Tables, schedule: Schedule) -> tuple[list[set[int]], list[set[int]]]:
    """By position of ``schedule``, what is repeated there, and the storages that wait for it."""
    place = {index: position for position, index in enumerate(tables.order)}
    repeats: list[set[int]] = [set()]
    for index in schedule:
        if place[index] == len(repeats) - 1:
            repeats.append(set())
        else:
            repeats[-1].add(place[index])
    waiting: list[set[int]] = [set() for _ in tables.order]
    wanted: set[int] = set()
    for position in range(tables.count - 1, -1, -1):
        wanted = wanted.difference(tables.first_writes[position]).union(tables.first_reads[position])
        for repeated in sorted(repeats[position], reverse=True):
            wanted = wanted.difference(tables.repeat_writes[repeated]).union(tables.repeat_reads[repeated])
        held = {v for v in tables.held if tables.writer[v] < position < tables.forward}
        waiting[position] = wanted | held
    return repeats, waiting
