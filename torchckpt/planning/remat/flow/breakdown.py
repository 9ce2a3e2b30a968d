"""Breakdown: what the bytes alive at one step of a schedule are used for, and which of them no schedule can free."""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torchckpt.planning.remat.flow.dataflow import Dataflow, Schedule
from torchckpt.planning.remat.flow.memory import residences, simulate

__all__ = ["Breakdown", "at_end", "at_peak"]


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

    @property
    def total_bytes(self) -> int:
        return sum(self.results_bytes.values()) + self.touched_bytes + self.workspace_bytes + self.kept_bytes


def at_peak(flow: Dataflow, schedule: Schedule, kinds: Mapping[int, str]) -> Breakdown:
    """The breakdown at the step of peak memory; if there are several, at the first.

    Args:
        kinds: the kind of each result. Default for a result that is missing here: output.
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
    """The bytes of each kind of result that are alive at the end of the step. They are the same for every schedule."""
    found = Counter[str]()
    for storage in sorted(flow.results.intersection(flow.writer)):
        found[kinds.get(storage, "outputs")] += flow.sizes_bytes[storage]
    return dict(found)
