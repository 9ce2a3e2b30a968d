"""Memory: simulate the bytes alive while a schedule runs, exactly."""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from torchckpt.errors import Fault, raise_fault
from torchckpt.planning.remat.flow.dataflow import Dataflow, Schedule, first_runs, repeats, runs

__all__ = ["Breakdown", "Memory", "Residence", "at_end", "at_peak", "lower_bound_bytes", "residences", "simulate"]


class Residence(NamedTuple):
    """One copy of a storage: alive from the step that writes it through its last use, both included."""

    storage: int
    first: int
    last: int


@dataclass(frozen=True)
class Memory:
    """The memory of a traced step: bytes alive during each step of a schedule, above what is given.

    ``boundary`` is the number of steps up to the last first run of the forward; ``saved`` are the storages that cross
    it because the backward reads them, in ascending order.
    """

    bytes_during: tuple[int, ...]
    boundary: int
    saved: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.bytes_during, default=0)


def simulate(flow: Dataflow, schedule: Schedule) -> Memory:
    """Simulate the memory of ``schedule``.

    While an operation runs, the storages that it reads and writes and its workspace are alive, and all storages that a
    later step reads. A use reads the newest copy of a storage (of a result, the first copy). A copy is freed after its
    last use.

    Raises:
        ArgumentError: the schedule does not fit the dataflow: an operation is missing, reads a storage that is not
            alive, is repeated although it must run once, or starts the backward before the forward has ended.
    """
    firsts = first_runs(schedule)
    boundary = 1 + max((firsts.get(index, -1) for index in range(flow.forward)), default=-1)
    changes = [0] * (len(schedule) + 1)
    crossing = set()
    for copy in residences(flow, schedule, boundary):
        size = flow.sizes_bytes[copy.storage]
        changes[copy.first] += size
        changes[copy.last + 1] -= size
        if copy.first < boundary <= copy.last:
            crossing.add(copy.storage)
    operations = runs(flow, schedule)
    during = (alive + operation.workspace_bytes for alive, operation in zip(accumulate(changes), operations))
    read = {storage for operation in operations[boundary:] for storage in operation.reads}
    return Memory(tuple(during), boundary, tuple(sorted(crossing & read)))


def residences(flow: Dataflow, schedule: Schedule, boundary: int) -> list[Residence]:
    """Every copy of every storage, by the step that writes it, the last first."""
    operations, firsts, results = runs(flow, schedule), first_runs(schedule), flow.results
    last_use = dict.fromkeys(results, len(schedule) - 1)
    copies = []
    for step in range(len(schedule) - 1, -1, -1):
        operation, first = operations[step], firsts[schedule[step]] == step
        for storage in operation.writes:
            if storage in results and not first:
                copies.append(Residence(storage, step, step))
                continue
            last = last_use.pop(storage, step)
            if first and storage in flow.forward_results:
                last = max(last, boundary - 1)
            copies.append(Residence(storage, step, last))
        for storage in operation.reads:
            if storage not in flow.given:
                last_use.setdefault(storage, step)
    _check(flow, schedule, firsts, boundary, last_use)
    return copies


def lower_bound_bytes(flow: Dataflow) -> int:
    """Bytes that every schedule needs, in any order: the most that one operation reads, writes and uses as workspace.

    An operation of the backward needs the results of the forward beside. The end of the step needs all results.
    """
    sizes = flow.sizes_bytes
    forward = {s for operation in flow.operations[: flow.forward] for s in operation.writes if s in flow.results}
    bound = sum(sizes[storage] for storage in flow.results if storage in flow.writer)
    for index, operation in enumerate(flow.operations):
        touched = {*operation.reads, *operation.writes} - flow.given
        alive = touched | forward if index >= flow.forward else touched
        bound = max(bound, sum(sizes[storage] for storage in alive) + operation.workspace_bytes)
    return bound


def _check(
    flow: Dataflow, schedule: Schedule, firsts: dict[int, int], boundary: int, unwritten: dict[int, int]
) -> None:
    operations, twice = flow.operations, repeats(schedule)
    for what, wrong in (
        ("does not run every operation", [index for index in flow.eager if index not in firsts]),
        ("runs an operation twice that is not repeatable", [i for i in twice if not operations[i].repeatable]),
        ("starts the backward before the forward ends", [i for i in schedule[:boundary] if i >= flow.forward]),
        ("reads a storage before it is written", [schedule[step] for step in unwritten.values() if step >= 0]),
    ):
        if wrong:
            received = f"the operation {operations[wrong[0]].name}"
            raise_fault(Fault(f"the schedule {what}", received, "schedule=flow.eager"))


@dataclass(frozen=True)
class Breakdown:
    """Bytes alive while the operation ``name`` runs, which is the operation ``index`` of the dataflow.

    Args:
        results_bytes: bytes of each kind of result, such as outputs. Results stay alive to the end of the step.
        touched_bytes: storages that the operation reads or writes, without results.
        workspace_bytes: temporary memory of the operation.
        kept_bytes: storages kept for later operations. Another schedule could free only these.
    """

    index: int
    name: str
    results_bytes: Mapping[str, int]
    touched_bytes: int
    workspace_bytes: int
    kept_bytes: int


def at_peak(flow: Dataflow, schedule: Schedule, kinds: Mapping[int, str]) -> Breakdown:
    """The breakdown at the step of peak memory; if there are several, at the first. ``kinds``: the kind of each result.
    Default for a result that is missing here: output."""
    memory = simulate(flow, schedule)
    step = memory.bytes_during.index(memory.peak_bytes)
    index = schedule[step]
    operation = runs(flow, schedule)[step]
    touched = {*operation.reads, *operation.writes}
    results, others = Counter[str](), Counter[bool]()
    for copy in residences(flow, schedule, memory.boundary):
        if copy.first <= step <= copy.last:
            size = flow.sizes_bytes[copy.storage]
            if copy.storage in flow.results:
                results[kinds.get(copy.storage, "outputs")] += size
            else:
                others[copy.storage in touched] += size
    return Breakdown(index, operation.name, dict(results), others[True], operation.workspace_bytes, others[False])


def at_end(flow: Dataflow, kinds: Mapping[int, str]) -> dict[str, int]:
    """The bytes of each kind of result that are alive at the end of the step. They are the same for every schedule."""
    bytes_of = Counter[str]()
    for storage in sorted(flow.results.intersection(flow.writer)):
        bytes_of[kinds.get(storage, "outputs")] += flow.sizes_bytes[storage]
    return dict(bytes_of)
