"""Ledger: FLOPs and moved bytes of a stage's operations, by part of the stage and by phase of the step."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from torchckpt.kernel.saved import storage_of
from torchckpt.plan.operation import Operation, operation_of
from torchckpt.plan.private import TorchDispatchMode

__all__ = ["AFTER", "BEFORE", "BOTH_GRADS", "FORWARD", "INPUT_GRAD", "Ledger", "Tally"]

FORWARD, INPUT_GRAD, BOTH_GRADS = "forward", "input_grad", "both_grads"
BEFORE, AFTER = -1, -2
"""Part numbers of operations outside of blocks: before the first block, and after it. Blocks count from 0."""

SecondsOf: TypeAlias = Callable[[Operation], float]


@dataclass
class Tally:
    seconds: float = 0.0
    flops: int = 0
    moved_bytes: int = 0

    def __sub__(self, other: Tally) -> Tally:
        return Tally(
            max(0.0, self.seconds - other.seconds), self.flops - other.flops, self.moved_bytes - other.moved_bytes
        )

    def copy(self) -> Tally:
        return Tally(self.seconds, self.flops, self.moved_bytes)


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Counts while it is entered and has a ``phase``.

    It has to be entered inside the mode whose tensors have no memory, so that it sees an operation first.
    """

    def __init__(self, seconds_of: SecondsOf, watched: Collection[StorageWeakRef] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._seconds_of = seconds_of
        self._watched = watched
        self.phase: str | None = None
        self.part = BEFORE
        self.tallies: defaultdict[tuple[str, int], Tally] = defaultdict(Tally)
        """The counts of each phase and part."""
        self.makers: dict[StorageWeakRef, int] = {}
        """The part in which a storage was made."""
        self.users: dict[StorageWeakRef, int] = {}
        """The first part that read each watched storage."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = operator(*args, **kwargs)
        if self.phase is not None:
            self._count(self.tallies[self.phase, self.part], operation_of(operator, args, kwargs, outputs))
        if self.phase == FORWARD:
            self._look((args, kwargs), outputs)
        return outputs

    def _count(self, tally: Tally, operation: Operation) -> None:
        tally.seconds += self._seconds_of(operation)
        tally.flops += operation.flops
        tally.moved_bytes += operation.moved_bytes

    def _look(self, read: Any, written: Any) -> None:
        for tensor in pytree.tree_leaves(read):
            if isinstance(tensor, Tensor):
                for storage in storage_of(tensor):
                    if storage in self._watched:
                        self.users.setdefault(storage, self.part)
                    else:
                        self.makers.setdefault(storage, BEFORE)  # it was made before the stage
        for tensor in pytree.tree_leaves(written):
            if isinstance(tensor, Tensor):
                for storage in storage_of(tensor):
                    self.makers.setdefault(storage, self.part)
