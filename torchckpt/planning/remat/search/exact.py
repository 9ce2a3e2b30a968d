"""Exact: the fastest schedule under a byte budget for some dozens of operations, proven by a solver.

It is an integer programme of what is repeated at each position, and which storages wait for the next one.
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

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

from torchckpt.errors import ArgumentError, Fault
from torchckpt.planning.remat.flow.dataflow import Dataflow, Schedule, Tables, placed_repeats
from torchckpt.planning.remat.flow.memory import simulate
from torchckpt.planning.remat.search.planner import solution

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver, IntVar

__all__ = ["Exact", "Retention", "optimum"]

_Literal: TypeAlias = "IntVar | bool"

_FINEST = 1_000_000
"""The solver counts in whole numbers. If seconds have no common unit, the unit is the step divided by this."""
_DEPTH = 3
"""How far back [5] goes: the inputs of v, their inputs, and so on."""


@dataclass(frozen=True)
class Exact:
    """The best schedule found, the seconds of all its runs, and a lower bound on the seconds of every schedule.

    If ``proven``, no schedule is faster, except by rounding. If the seconds of operations are multiples of one unit,
    nothing is rounded. Otherwise the solver counts each repeat as up to a millionth of the step less than it takes.
    """

    schedule: Schedule
    seconds: float
    bound_seconds: float
    proven: bool


def optimum(
    flow: Dataflow,
    budget_bytes: int,
    *,
    time_limit_seconds: float = 60.0,
    workers: int = 2,
    hint: Schedule | None = None,
    pinned: Set[int] = frozenset(),
) -> Exact | None:
    """The fastest schedule whose peak, as :func:`simulate` counts it, is at most ``budget_bytes``.

    It is the fastest one with the same order of first runs as ``hint``; the bound holds for these schedules only.
    Between two first runs, an operation is repeated at most once, and repeats come in the order of first runs. An
    operation that writes results of the forward is not repeated in the forward. Another order of first runs may allow
    a faster schedule; the planner tries some. To plan, use the planner; this function tells how good its schedule is.

    OR-tools' CP-SAT solves it as an integer programme: see :class:`Retention`.

    Returns:
        None if no schedule fits, or none was found in time and ``hint`` does not fit.

    Args:
        time_limit_seconds: the solver stops after that, with the best schedule and bound so far. Default: 60.
        workers: threads of the solver. With one, equal calls return equal schedules, unless time runs out. Default: 2.
        hint: a schedule to start from, such as the planner's, which also gives the order of first runs. If it fits and
            nothing faster is found, it is returned. Default: no schedule, and the eager order.
        pinned: storages that no repeat may write. Default: none.

    Example:
        Three tanh in a row, of one byte each. The backward reads the first one last, so it is repeated for that:

        >>> from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation
        >>> forward = [Operation("tanh", (i,), (i + 1,), 1.0) for i in range(3)]
        >>> backward = [Operation("tanh_dx", (3 - i, i + 3), (i + 4,), 1.0) for i in range(3)]
        >>> backward[0] = Operation("tanh_dx", (3,), (4,), 1.0)
        >>> flow = Dataflow((*forward, *backward), (1,) * 7, 3, given=frozenset({0}), results=frozenset({6}))
        >>> simulate(flow, flow.eager).peak_bytes
        4
        >>> optimum(flow, 3)
        Exact(schedule=(0, 1, 2, 3, 4, 0, 5), seconds=7.0, bound_seconds=7.0, proven=True)

    Raises:
        ArgumentError: OR-tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        fault = Fault("OR-tools is missing, which finds an exact optimum", str(error), "pip install 'torchckpt[exact]'")
        raise ArgumentError(str(fault)) from error
    if simulate(flow, flow.eager).peak_bytes <= budget_bytes:
        return Exact(tuple(flow.eager), flow.seconds, flow.seconds, True)
    hinted = hint if hint is not None and simulate(flow, hint).peak_bytes <= budget_bytes else None
    order = list(flow.eager if hint is None else dict.fromkeys(hint))
    tables = Tables(flow, pinned, order)
    model = cp_model.CpModel()
    programme = Retention(model, tables, budget_bytes, hinted)
    costs = [flow.operations[index].repeat.seconds for index in order]
    unit = _measure(costs, flow.seconds)
    whole = [math.floor(seconds / unit * (1 + 1e-12)) for seconds in costs]
    model.minimize(sum(whole[position] * flag for (_, position), flag in programme.repeats.items()))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_seconds
    solver.parameters.num_workers = workers
    # The bound comes from the linear relaxation: the solver's usual choice for two workers makes little of it.
    solver.parameters.subsolvers.append("max_lp")
    status = solver.solve(model)
    schedules = [] if hinted is None else [hinted]
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        schedules.append(programme.schedule(solver))
    if not schedules:
        return None
    best = min((solution(flow, schedule) for schedule in schedules), key=attrgetter("seconds"))
    bound = flow.seconds + max(0.0, solver.best_objective_bound * unit)
    return Exact(best.schedule, best.seconds, min(bound, best.seconds), status == cp_model.OPTIMAL)


def _measure(costs: Sequence[float], step_seconds: float) -> float:
    """The unit of seconds: the least cost divided by 1 to 12 if all costs are multiples of that; else a fine part of
    the step."""
    least = min((seconds for seconds in costs if seconds > 0), default=1.0)
    for parts in range(1, 13):
        unit = least / parts
        if all(abs(seconds / unit - round(seconds / unit)) < 1e-9 * max(1.0, seconds / unit) for seconds in costs):
            return unit
    return max(step_seconds, least) / _FINEST


class Retention:
    """The integer programme for the step of ``tables``. ``model``: an empty model, which gets variables and
    constraints, but no objective. ``hint``: a schedule that meets the constraints, from which the solver starts."""

    def __init__(self, model: CpModel, tables: Tables, budget_bytes: int, hint: Schedule | None) -> None:
        self.model, self.tables, self.budget_bytes = model, tables, budget_bytes
        self.hinted: dict[int, bool] | None = None if hint is None else {}
        hinted, waiting = _trace(tables, hint or ())
        self.first_readers, self.repeat_readers = _readers(tables.first_reads), _readers(tables.repeat_reads)
        useful = self._useful()
        self.repeats = {
            (position, repeated): self._flag(repeated in hinted[position])
            for repeated in range(tables.count)
            for position in range(repeated + 1, useful[repeated] + 1)
            if tables.may_repeat(repeated, position)
        }
        self.waits = {
            (position, storage): self._flag(storage in waiting[position])
            for storage, writer in tables.writer.items()
            for position in range(writer + 1, max(self._last_use(storage, useful), self._stays_until(storage)) + 1)
        }
        for (position, storage), flag in self.waits.items():
            if position <= self._stays_until(storage):
                model.add(flag == 1)
        self._provide()
        self._fit()
        self._cut()

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

    def _either(self, left: _Literal, right: IntVar) -> _Literal:
        """A literal that is true if ``left`` or ``right`` is."""
        if isinstance(left, bool):
            return left or right
        flag = self._flag(self.hinted is not None and (self.hinted[left.index] or self.hinted[right.index]))
        self.model.add_implication(left, flag)
        self.model.add_implication(right, flag)
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
        repeated = (useful[position] for position in self.repeat_readers[storage])
        return max((*self.first_readers[storage], *repeated), default=-1)

    def _stays_until(self, storage: int) -> int:
        return self.tables.forward - 1 if storage in self.tables.staying else -1

    # constraints

    def _present(self, storage: int, position: int) -> list[_Literal]:
        """The literals one of which is true if runs at ``position`` can read ``storage``: it waits, or is written."""
        writer = self.tables.writer[storage]
        present: list[_Literal] = [True] if writer == position else []
        if (position, storage) in self.waits:
            present.append(self.waits[position, storage])
        if (position, writer) in self.repeats and storage in self.tables.repeat_writes[writer]:
            present.append(self.repeats[position, writer])
        return present

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
            alive: dict[int, list[tuple[int, _Literal]]] = defaultdict(list)
            for storage, writer in tables.writer.items():
                if writer <= position and self._present(storage, position):
                    for repeated, literal in self._alive(storage, position, runs):
                        alive[repeated].append((tables.sizes[storage], literal))
            for repeated in runs[:-1]:
                extra = (tables.repeat_extra_bytes[repeated], self.repeats[position, repeated])
                self._within(self.budget_bytes - tables.floor_bytes[position], [*alive[repeated], extra])
            room = self.budget_bytes - tables.floor_bytes[position] - tables.first_extra_bytes[position]
            self._within(room, alive[position])

    def _alive(self, storage: int, position: int, runs: list[int]) -> Iterator[tuple[int, _Literal]]:
        """For each run that may be at ``position``, the last first, what it runs, and whether ``storage`` is alive."""
        tables, writer = self.tables, self.tables.writer[storage]
        alive: _Literal = position == self._stays_until(storage) or self.waits.get((position + 1, storage), False)
        for repeated in reversed(runs):
            if repeated < writer:
                alive = self.waits.get((position, storage), False)
            elif repeated == position:
                alive = True if storage in tables.first_touches[position] else alive
            elif storage in tables.repeat_reads[repeated] or storage in tables.repeat_writes[repeated]:
                alive = self._either(alive, self.repeats[position, repeated])
            yield repeated, alive

    def _within(self, room_bytes: int, terms: Iterable[tuple[int, _Literal]]) -> None:
        fixed = sum(size for size, literal in terms if literal is True)
        free = [(size, literal) for size, literal in terms if size and not isinstance(literal, bool)]
        if sum(size for size, _ in free) + fixed > room_bytes:
            self.model.add(sum(size * literal for size, literal in free) <= room_bytes - fixed)

    def _cut(self) -> None:
        """[5], for each storage, each position at which it may wait, and the next first run that reads it."""
        for storage, writer in self.tables.writer.items():
            uses = self.first_readers[storage]
            for position in range(writer + 1, max(uses, default=-1) + 1):
                use = uses[bisect_left(uses, position)]
                self._cut_back(position, use, storage, [self.waits[position, storage]])

    def _cut_back(self, position: int, use: int, storage: int, waiting: list[IntVar]) -> None:
        tables, writer = self.tables, self.tables.writer[storage]
        spans = range(position, use + 1) if storage in tables.repeat_writes[writer] else range(0)
        repeats = [self.repeats[t, writer] for t in spans if (t, writer) in self.repeats]
        self.model.add_bool_or([*waiting, *repeats])
        if repeats and len(waiting) <= _DEPTH:
            for read in tables.repeat_reads[writer]:
                if (position, read) in self.waits:
                    self._cut_back(position, use, read, [*waiting, self.waits[position, read]])


def _readers(reads: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """For each storage, the positions that read it, in ascending order."""
    readers: dict[int, list[int]] = defaultdict(list)
    for position, storages in enumerate(reads):
        for storage in storages:
            readers[storage].append(position)
    return readers


def _trace(tables: Tables, schedule: Schedule) -> tuple[list[set[int]], list[set[int]]]:
    """For each position of ``schedule``, what is repeated there, and the storages that wait for it."""
    repeats: list[set[int]] = [set() for _ in range(tables.count + 1)]
    for position, repeated in placed_repeats(schedule, tables.order):
        repeats[position].add(repeated)
    waiting: list[set[int]] = [set() for _ in tables.order]
    wanted: set[int] = set()
    for position in range(tables.count - 1, -1, -1):
        wanted = wanted.difference(tables.first_writes[position]).union(tables.first_reads[position])
        for repeated in sorted(repeats[position], reverse=True):
            wanted = wanted.difference(tables.repeat_writes[repeated]).union(tables.repeat_reads[repeated])
        staying = {v for v in tables.staying if tables.writer[v] < position < tables.forward}
        waiting[position] = wanted | staying
    return repeats, waiting
