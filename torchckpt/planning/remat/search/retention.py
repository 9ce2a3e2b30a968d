"""Retention: an integer programme of which stages repeat an operation, and which storages wait from stage to stage.

Stage t is the first run at position t and, before it, its repeats, in ascending order. Two kinds of decisions, as in
Checkmate (Jain et al., 2020):

    R[t,p]   stage t repeats position p
    S[t,v]   storage v waits from stage t-1 for stage t

and their constraints, where position w(v) writes v:

    [1] a first run in t reads v                S[t,v] + R[t,w(v)] >= 1
    [2] a repeat of p in t reads v              S[t,v] + R[t,w(v)] >= R[t,p]
    [3] v was alive before it waits             S[t,v] + R[t,w(v)] >= S[t+1,v]
    [4] at every run, what is alive fits: its outputs, and what waits or is read by this run or a later one of the stage
    [5] before a use of v in stage T, v waits in t, or an input u of w(v) does, or u is repeated from t to T:
                                                S[t,v] + S[t,u] + R[t,w(u)] + ... + R[T,w(u)] >= 1

For whole numbers, [5] follows from the others. Without it, the linear relaxation repeats a tenth of w(v) in each of ten
stages, and a tenth of u that waits is enough for all of them. That gives useless bounds: 0.6 % of the step where 12 %
are needed. With [5], the optimum of steps of some sixty operations is proven in seconds.
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
        repeated, waiting = ([], []) if hint is None else _trace(tables, hint)
        self.readers = _readers(tables)
        useful = self._useful()
        self.repeats = {
            (stage, position): self._flag(bool(repeated) and position in repeated[stage])
            for position in range(tables.count)
            for stage in range(position + 1, useful[position] + 1)
            if tables.may_repeat(position, stage)
        }
        self.waits = {
            (stage, storage): self._flag(bool(waiting) and storage in waiting[stage])
            for storage, writer in tables.writer.items()
            for stage in range(writer + 1, max(self._last_use(storage, useful), self._held_until(storage)) + 1)
        }
        self._hold()
        self._provide()
        self._fit()
        self._cut()
        if most_repeats is not None:
            self._limit(most_repeats)

    def schedule(self, solver: CpSolver) -> Schedule:
        order = self.tables.order
        repeated: list[list[int]] = [[] for _ in order]
        for (stage, position), flag in self.repeats.items():
            if solver.boolean_value(flag):
                repeated[stage].append(position)
        return tuple(order[p] for stage, repeats in enumerate(repeated) for p in (*sorted(repeats), stage))

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
        """For each position, the last stage in which its repeat can have a reader."""
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
        for (stage, storage), flag in self.waits.items():
            if stage <= self._held_until(storage):
                self.model.add(flag == 1)

    def _present(self, storage: int, stage: int) -> list[Literal]:
        """The literals one of which is true if runs in ``stage`` can read ``storage``: it waits, or is written."""
        writer = self.tables.writer[storage]
        found: list[Literal] = [True] if writer == stage else []
        if (stage, storage) in self.waits:
            found.append(self.waits[stage, storage])
        if (stage, writer) in self.repeats and storage in self.tables.repeat_writes[writer]:
            found.append(self.repeats[stage, writer])
        return found

    def _provide(self) -> None:
        tables = self.tables
        for stage in range(tables.count):
            for storage in tables.first_reads[stage]:
                self._need(storage, stage)  # [1]
        for (stage, position), flag in self.repeats.items():
            for storage in tables.repeat_reads[position]:
                self._need(storage, stage, flag)  # [2]
        for (stage, storage), flag in self.waits.items():
            self._need(storage, stage - 1, flag)  # [3]

    def _need(self, storage: int, stage: int, condition: IntVar | None = None) -> None:
        present = self._present(storage, stage)
        if not any(literal is True for literal in present):
            clause = self.model.add_bool_or(present)
            if condition is not None:
                clause.only_enforce_if(condition)

    def _fit(self) -> None:
        """[4]"""
        tables = self.tables
        for stage in range(tables.count):
            runs = [position for position in range(stage) if (stage, position) in self.repeats] + [stage]
            alive: dict[int, list[tuple[int, Literal]]] = defaultdict(list)
            for storage, writer in tables.writer.items():
                if writer <= stage and self._present(storage, stage):
                    for position, literal in self._alive(storage, stage, runs):
                        alive[position].append((tables.sizes[storage], literal))
            for position in runs[:-1]:
                extra = (tables.repeat_extra_bytes[position], self.repeats[stage, position])
                self._within(self.budget_bytes - tables.floor_bytes[stage], [*alive[position], extra])
            room = self.budget_bytes - tables.floor_bytes[stage] - tables.first_extra_bytes[stage]
            self._within(room, alive[stage])

    def _alive(self, storage: int, stage: int, runs: list[int]) -> Iterator[tuple[int, Literal]]:
        """For each run that ``stage`` may make, the last first, its position and whether ``storage`` is then alive."""
        tables, writer = self.tables, self.tables.writer[storage]
        alive: Literal = stage == self._held_until(storage) or self.waits.get((stage + 1, storage), False)
        for position in reversed(runs):
            if position < writer:
                alive = self.waits.get((stage, storage), False)
            elif position == stage:
                alive = True if storage in tables.first_touches[stage] else alive
            elif storage in tables.repeat_reads[position] or storage in tables.repeat_writes[position]:
                alive = self._either(alive, self.repeats[stage, position])
            yield position, alive

    def _within(self, room_bytes: int, terms: Iterable[tuple[int, Literal]]) -> None:
        fixed = sum(size for size, literal in terms if literal is True)
        free = [(size, literal) for size, literal in terms if size and not isinstance(literal, bool)]
        if sum(size for size, _ in free) + fixed > room_bytes:
            self.model.add(sum(size * literal for size, literal in free) <= room_bytes - fixed)

    def _cut(self) -> None:
        """[5], for each storage, each stage in which it may wait, and the next first run that reads it."""
        for storage, writer in self.tables.writer.items():
            uses = [position for position in self.readers[storage] if storage in self.tables.first_reads[position]]
            for stage in range(writer + 1, max(uses, default=-1) + 1):
                use = uses[bisect_left(uses, stage)]
                self._cut_back(stage, use, storage, [self.waits[stage, storage]])

    def _cut_back(self, stage: int, use: int, storage: int, waiting: list[IntVar]) -> None:
        tables, writer = self.tables, self.tables.writer[storage]
        spans = range(stage, use + 1) if storage in tables.repeat_writes[writer] else range(0)
        repeats = [self.repeats[t, writer] for t in spans if (t, writer) in self.repeats]
        self.model.add_bool_or([*waiting, *repeats])
        if repeats and len(waiting) <= DEPTH:
            for read in tables.repeat_reads[writer]:
                if (stage, read) in self.waits:
                    self._cut_back(stage, use, read, [*waiting, self.waits[stage, read]])

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
    """By stage of ``schedule``, the positions that it repeats, and the storages that wait for it."""
    place = {index: position for position, index in enumerate(tables.order)}
    repeated: list[set[int]] = [set()]
    for index in schedule:
        if place[index] == len(repeated) - 1:
            repeated.append(set())
        else:
            repeated[-1].add(place[index])
    waiting: list[set[int]] = [set() for _ in tables.order]
    wanted: set[int] = set()
    for stage in range(tables.count - 1, -1, -1):
        wanted = wanted.difference(tables.first_writes[stage]).union(tables.first_reads[stage])
        for position in sorted(repeated[stage], reverse=True):
            wanted = wanted.difference(tables.repeat_writes[position]).union(tables.repeat_reads[position])
        held = {v for v in tables.held if tables.writer[v] < stage < tables.forward}
        waiting[stage] = wanted | held
    return repeated, waiting
