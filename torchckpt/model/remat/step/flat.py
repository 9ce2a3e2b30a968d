"""Flat: a dataflow as flat lists, for a planner that asks the same questions a million times."""
from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import accumulate

from torchckpt.model.remat.step.dataflow import Dataflow, Operation

__all__ = ["Tables"]

_TIE = 1e-7
"""The share of an operation's mean seconds that each repeat costs in addition, so that fewer repeats win a tie."""


class Tables:
    """What a planner asks about a dataflow whose operations run first in ``order``.

    Everything is indexed by *position*: position p is operation ``order[p]``. Given storages and results are left out.
    In every plan, a result is alive from its first write to the end of the step, so its bytes are in ``floor_bytes``
    and in the extra bytes of the operation that writes it.

    Args:
        pinned: storages that no repeat may write.
        order: a topological order, the forward first; the eager one by default.
    """

    def __init__(self, flow: Dataflow, pinned: Set[int] = frozenset(), order: Sequence[int] | None = None) -> None:
        self.flow = flow
        self.order = list(flow.eager if order is None else order)
        self.count, self.forward = len(self.order), flow.forward
        self.sizes = flow.sizes_bytes
        self.untracked = flow.given | flow.results
        self.held = flow.forward_results - self.untracked if self.forward else frozenset()
        operations = [flow.operations[index] for index in self.order]
        self.first_reads = [self._tracked(operation.reads) for operation in operations]
        self.first_writes = [self._tracked(operation.writes) for operation in operations]
        self.first_touches = [
            frozenset((*reads, *writes)) for reads, writes in zip(self.first_reads, self.first_writes)
        ]
        self.repeat_reads = [self._tracked(operation.repeat.reads) for operation in operations]
        self.repeat_writes = [self._tracked(operation.repeat.writes) for operation in operations]
        written = [self._result_bytes(operation) for operation in operations]
        self.floor_bytes = [0, *accumulate(written)][: self.count]
        self.first_extra_bytes = [o.workspace_bytes + more for o, more in zip(operations, written)]
        self.repeat_extra_bytes = [o.repeat.workspace_bytes + self._result_bytes(o.repeat) for o in operations]
        self.plain_bytes = [
            extra + sum(self.sizes[s] for s in touched)
            for extra, touched in zip(self.first_extra_bytes, self.first_touches)
        ]
        tie = _TIE * (sum(o.repeat.seconds for o in operations) / max(1, self.count) or 1.0)
        self.repeat_cost = [operation.repeat.seconds + tie for operation in operations]
        self.writer = {s: position for position, writes in enumerate(self.first_writes) for s in writes}
        self.repeatable = [self._repeatable(position, o, pinned) for position, o in enumerate(operations)]
        self.recoverable = frozenset(
            s for position in range(self.count) if self.repeatable[position] for s in self.repeat_writes[position]
        )
        self.gradients = frozenset(s for writes in self.first_writes[self.forward:] for s in writes)
        self.earliest = [self.forward if self.held & set(writes) else 0 for writes in self.repeat_writes]
        """By position, the first stage in which it may repeat. A new value of a buffer is alive to the boundary."""

    def may_repeat(self, position: int, stage: int) -> bool:
        return self.repeatable[position] and stage >= self.earliest[position]

    def _tracked(self, storages: Sequence[int]) -> tuple[int, ...]:
        return tuple(s for s in storages if s not in self.untracked)

    def _result_bytes(self, operation: Operation) -> int:
        return sum(self.sizes[s] for s in operation.writes if s in self.flow.results)

    def _repeatable(self, position: int, operation: Operation, pinned: Set[int]) -> bool:
        """Whether ``operation`` may repeat, and writes a storage that can be dropped."""
        reads, writes = self.repeat_reads[position], self.repeat_writes[position]
        in_order = all(self.writer[s] <= position and s not in writes for s in reads)
        return operation.repeatable and in_order and bool(writes) and not pinned & set(operation.repeat.writes)
