"""Breakdown: whose the bytes are at one step of a schedule, and which of them no schedule can free."""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torchckpt.model.remat.dataflow import Dataflow, Schedule
from torchckpt.model.remat.memory import residences, simulate

__all__ = ["Breakdown", "at_end", "at_peak"]


@dataclass(frozen=True)
class Breakdown:
    """Bytes alive while the operation ``name`` runs, which is the operation ``index`` of the dataflow.

    Args:
        results_bytes: by what they are, such as outputs: they stay to the end of the step.
        touched_bytes: what the operation reads and writes, results apart.
        workspace_bytes: what it allocates for itself.
        kept_bytes: for what comes after it: the only part that another schedule could free.
    """

    index: int
    name: str
    results_bytes: Mapping[str, int]
    touched_bytes: int
    workspace_bytes: int
    kept_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.results_bytes.values()) + self.touched_bytes + self.workspace_bytes + self.kept_bytes


def at_peak(flow: Dataflow, schedule: Schedule, kinds: Mapping[int, str]) -> Breakdown:
    """At the highest step, the first of several.

    Args:
        kinds: what each result is; one without a kind is an output.
    """
    memory = simulate(flow, schedule)
    step = memory.bytes_during.index(memory.peak_bytes)
    index = schedule[step]
    operation = flow.operations[index] if index not in schedule[:step] else flow.operations[index].repeat
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
    """What is alive when the step has ended, whatever its schedule: the bytes of each kind of result."""
    found = Counter[str]()
    for storage in sorted(flow.results.intersection(flow.writer)):
        found[kinds.get(storage, "outputs")] += flow.sizes_bytes[storage]
    return dict(found)
