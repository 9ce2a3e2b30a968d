"""Dataflow: one training step as operations that read and write storages, without torch."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

__all__ = ["Dataflow", "Operation", "Schedule"]

Schedule: TypeAlias = Sequence[int]
"""Operations in the order in which they run, by their index in the dataflow; an index may repeat."""


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
