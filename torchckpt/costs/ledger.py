"""Ledger: seconds and FLOPs of a stage's operations, by part of the stage and by phase of the step."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeAlias

from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.costs.operation import Operation, operation_of
from torchckpt.costs.private import TorchDispatchMode
from torchckpt.regions.saved import storage_of
from torchckpt.tensors import tensors_in

__all__ = ["AFTER", "BEFORE", "BOTH_GRADS", "FORWARD", "INPUT_GRAD", "REPLAY", "Ledger", "SecondsOf"]

FORWARD, INPUT_GRAD, BOTH_GRADS, REPLAY = "forward", "input_grad", "both_grads", "replay"
BEFORE, AFTER = -1, -2
"""Part numbers of operations outside of blocks: before the first block, and after it. Blocks count from 0."""

SecondsOf: TypeAlias = Callable[[Operation], float]


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
        self.seconds: defaultdict[tuple[str, int], float] = defaultdict(float)
        """The seconds of each phase and part."""
        self.flops: Counter[tuple[str, int]] = Counter()
        self.makers: dict[StorageWeakRef, int] = {}
        """The part in which a storage was made."""
        self.users: dict[StorageWeakRef, int] = {}
        """The first part that read each watched storage."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = operator(*args, **kwargs)
        if self.phase is not None:
            operation = operation_of(operator, args, kwargs, outputs)
            self.seconds[self.phase, self.part] += self._seconds_of(operation)
            self.flops[self.phase, self.part] += operation.flops
        if self.phase == FORWARD:
            self._look((args, kwargs), outputs)
        return outputs

    def saved(self) -> None:
        """Note that the part saved a tensor: a replay goes at least so far."""
        self.seconds[REPLAY, self.part] = self.seconds[FORWARD, self.part]
        self.flops[REPLAY, self.part] = self.flops[FORWARD, self.part]

    def _look(self, read: Any, written: Any) -> None:
        for storage in _storages_in(read):
            if storage in self._watched:
                self.users.setdefault(storage, self.part)
            else:
                self.makers.setdefault(storage, BEFORE)  # it was made before the stage
        for storage in _storages_in(written):
            self.makers.setdefault(storage, self.part)


def _storages_in(tree: Any) -> Iterator[StorageWeakRef]:
    return (storage for tensor in tensors_in(tree) for storage in storage_of(tensor))
