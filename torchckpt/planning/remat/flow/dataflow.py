"""Dataflow: one training step as operations that read and write storages, without torch."""
from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

__all__ = ["Dataflow", "Operation", "Schedule", "Tables", "first_runs", "placed_repeats", "repeats", "runs"]

Schedule: TypeAlias = Sequence[int]
"""The operations of one traced step in the order in which they run, by their index in the dataflow; an index may
repeat. (``Schedule`` of :mod:`torchckpt.planning` is that of a pipeline.)"""


@dataclass(frozen=True)
class Operation:
    """One kernel call.

    Args:
        name: the name of its graph node.
        reads: the storages that must be alive when it runs, each once.
        writes: the storages that it allocates, each once. No storage is written by two operations.
        seconds: its duration, in seconds or any one unit.
        flops: multiplications and additions; what ``recompute_flops`` counts.
        workspace_bytes: temporary memory that it allocates while it runs.
        repeatable: false if it must run only once: it draws random numbers, communicates, or has a side effect.
        substitute: the operation that a repeat runs instead, if it differs. A repeated dropout multiplies by the saved
            mask; a repeated batch norm leaves the running statistics unchanged. It writes only storages that this one
            writes.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    seconds: float
    flops: int = 0
    workspace_bytes: int = 0
    repeatable: bool = True
    substitute: Operation | None = None

    @property
    def repeat(self) -> Operation:
        """The operation that runs when this one is repeated."""
        return self.substitute or self


@dataclass(frozen=True)
class Dataflow:
    """Operations in the order of the eager step: ``operations[:forward]`` are its forward, the rest its backward.

    Args:
        operations: in an order in which they can run. Each is needed: there is no dead code.
        sizes_bytes: of each storage.
        forward: the number of operations of the forward.
        given: storages that exist before the step and outlive it (parameters, inputs). No operation writes them, and
            their bytes are not counted.
        results: storages alive from their first write to the end of the step: outputs, gradients. If a repeat writes
            one again, nothing reads that copy.
        forward_results: storages alive from their first write to the end of the forward at least, and after it as
            long as they are read: new values of buffers.
    """

    operations: tuple[Operation, ...]
    sizes_bytes: tuple[int, ...]
    forward: int
    given: frozenset[int] = field(default_factory=frozenset)
    results: frozenset[int] = field(default_factory=frozenset)
    forward_results: frozenset[int] = field(default_factory=frozenset)

    @cached_property
    def writer(self) -> dict[int, int]:
        """For each storage that is not given, the operation that writes it."""
        return {storage: index for index, operation in enumerate(self.operations) for storage in operation.writes}

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """For each storage that is read, the operations that read it, in their order."""
        readers: dict[int, list[int]] = {}
        for index, operation in enumerate(self.operations):
            for storage in operation.reads:
                readers.setdefault(storage, []).append(index)
        return readers

    @cached_property
    def recoverable(self) -> frozenset[int]:
        """The storages that a repeat writes. They may be dropped and recomputed."""
        return frozenset(s for operation in self.operations if operation.repeatable for s in operation.repeat.writes)

    @property
    def seconds(self) -> float:
        """The seconds of the step in which every operation runs once."""
        return sum(operation.seconds for operation in self.operations)

    @property
    def eager(self) -> Schedule:
        """The schedule in which every operation runs once."""
        return range(len(self.operations))


def first_runs(schedule: Schedule) -> dict[int, int]:
    """For each operation, the step of ``schedule`` that runs it first."""
    return {schedule[step]: step for step in range(len(schedule) - 1, -1, -1)}


def repeats(schedule: Schedule) -> tuple[int, ...]:
    """The operations that ``schedule`` runs again, in the order of these repeats."""
    firsts = first_runs(schedule)
    return tuple(index for step, index in enumerate(schedule) if firsts[index] != step)


def placed_repeats(schedule: Schedule, order: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The repeats of ``schedule``, whose first runs are in ``order``: the position of the first run before which each
    stands, and of that which it repeats."""
    places, position = {index: place for place, index in enumerate(order)}, 0
    for place in (places[index] for index in schedule):
        if place == position:
            position += 1
        else:
            yield position, place


def runs(flow: Dataflow, schedule: Schedule) -> list[Operation]:
    """What each step of ``schedule`` runs: the operation, or what a repeat runs in its place."""
    operations, firsts = flow.operations, first_runs(schedule)
    return [operations[i] if firsts[i] == step else operations[i].repeat for step, i in enumerate(schedule)]


_TIE = 1e-7
"""The share of an operation's mean seconds that each repeat costs in addition, so that fewer repeats win a tie."""


class Tables:
    """What a planner asks about a dataflow whose operations run first in ``order``.

    Everything is indexed by *position*: position p is operation ``order[p]``. Given storages and results are left out.
    In every plan, a result is alive from its first write to the end of the step, so its bytes are in ``floor_bytes``
    and in the extra bytes of the operation that writes it. New values of buffers are ``staying`` to the boundary.
    ``pinned``: storages that no repeat may write. ``order``: a topological order, the forward first; the eager one by
    default.
    """

    def __init__(self, flow: Dataflow, pinned: Set[int] = frozenset(), order: Sequence[int] | None = None) -> None:
        self.flow = flow
        self.order = list(flow.eager if order is None else order)
        self.count, self.forward = len(self.order), flow.forward
        self.sizes = flow.sizes_bytes
        self.untracked = flow.given | flow.results
        self.staying = flow.forward_results - self.untracked if self.forward else frozenset()
        operations = [flow.operations[index] for index in self.order]
        self.first_reads = [self._tracked(operation.reads) for operation in operations]
        self.first_writes = [self._tracked(operation.writes) for operation in operations]
        self.first_touches = [
            frozenset((*reads, *writes)) for reads, writes in zip(self.first_reads, self.first_writes)
        ]
        self.repeat_reads = [self._tracked(operation.repeat.reads) for operation in operations]
        self.repeat_writes = [self._tracked(operation.repeat.writes) for operation in operations]
        written = [self._result_bytes(operation) for operation in operations]
        self.floor_bytes = list(accumulate(written, initial=0))[: self.count]
        self.first_extra_bytes = [o.workspace_bytes + more for o, more in zip(operations, written)]
        self.repeat_extra_bytes = [o.repeat.workspace_bytes + self._result_bytes(o.repeat) for o in operations]
        self.plain_bytes = [
            extra + sum(self.sizes[s] for s in touched)
            for extra, touched in zip(self.first_extra_bytes, self.first_touches)
        ]
        if self.staying:
            untouched = self.staying - self.first_touches[self.forward - 1]
            self.plain_bytes[self.forward - 1] += sum(self.sizes[storage] for storage in untouched)
        tie = _TIE * (sum(o.repeat.seconds for o in operations) / max(1, self.count) or 1.0)
        self.repeat_cost = [operation.repeat.seconds + tie for operation in operations]
        self.writer = {s: position for position, writes in enumerate(self.first_writes) for s in writes}
        self.repeatable = [self._repeatable(position, o, pinned) for position, o in enumerate(operations)]
        self.recoverable = frozenset(
            s for position in range(self.count) if self.repeatable[position] for s in self.repeat_writes[position]
        )
        self.gradients = frozenset(s for writes in self.first_writes[self.forward:] for s in writes)
        self.earliest = [self.forward if self.staying & set(writes) else 0 for writes in self.repeat_writes]
        """For each position, the first at which it may be repeated."""
        self.arrival = self.forward if self.forward < self.count and not self.first_reads[self.forward] else -1
        """The first position of the backward, if that reads nothing: the gradients arrive. No repeat comes before."""

    def may_repeat(self, repeated: int, position: int) -> bool:
        return self.repeatable[repeated] and position >= self.earliest[repeated] and position != self.arrival

    def _tracked(self, storages: Sequence[int]) -> tuple[int, ...]:
        return tuple(s for s in storages if s not in self.untracked)

    def _result_bytes(self, operation: Operation) -> int:
        return sum(self.sizes[s] for s in operation.writes if s in self.flow.results)

    def _repeatable(self, position: int, operation: Operation, pinned: Set[int]) -> bool:
        """Whether ``operation`` may repeat, and writes a storage that can be dropped."""
        reads, writes = self.repeat_reads[position], self.repeat_writes[position]
        in_order = all(self.writer[s] <= position and s not in writes for s in reads)
        return operation.repeatable and in_order and bool(writes) and not pinned & set(operation.repeat.writes)
