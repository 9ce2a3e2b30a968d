"""Ledger: FLOPs and moved bytes of a stage's operations, by part of the stage and by phase of the step."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from torchckpt.costs.operation import Operation, operation_of
from torchckpt.costs.private import TorchDispatchMode
from torchckpt.regions.saved import storage_of

__all__ = ["AFTER", "BEFORE", "BOTH_GRADS", "FORWARD", "INPUT_GRAD", "Held", "Holdings", "Ledger", "Tally"]

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


@dataclass(frozen=True)
class Held:
    """The bytes of one part. Operations outside of blocks have no boundary."""

    saved_bytes: int
    boundary_bytes: int = 0
    unsaved_bytes: int = 0
    """Bytes of the boundary that a kept block does not save: half-precision inputs of which it saves copies in float32.
    If the block is recomputed before its gradient arrives, they are in memory beside its saved bytes."""


@dataclass
class Holdings:
    """Collects the inputs and saved tensors of one forward; then :meth:`found` has the bytes of each part."""

    static: Collection[StorageWeakRef]
    sizes: dict[StorageWeakRef, int] = field(default_factory=dict)
    given: list[set[StorageWeakRef]] = field(default_factory=list)
    """The inputs of each block."""
    saved: dict[int, set[StorageWeakRef]] = field(default_factory=dict)
    """The saved storages of each part."""

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Add the inputs of the next block."""
        self.given.append({storage for tensor in tensors for storage in self._met(tensor)})

    def save(self, part: int, tensor: Tensor) -> None:
        self.saved.setdefault(part, set()).update(self._met(tensor))

    def found(self, makers: dict[StorageWeakRef, int]) -> dict[int, Held]:
        """The bytes of each part.

        Args:
            makers: the part that made each storage.
        """
        times = Counter(storage for given in self.given for storage in given)
        outside = {part: set(self.saved.get(part, ())) for part in (BEFORE, AFTER)}
        outside[BEFORE] |= {storage for storage, count in times.items() if count > 1}
        for block in range(len(self.given)):
            strange = {one for one in self.saved.get(block, ()) if makers.get(one, BEFORE) != block} - times.keys()
            outside[BEFORE] |= strange
        outside[AFTER] -= outside[BEFORE]
        always = outside[BEFORE] | outside[AFTER]
        found = {part: Held(self._bytes(storages)) for part, storages in outside.items()}
        anywhere = {storage for saved in self.saved.values() for storage in saved}
        for block, given in enumerate(self.given):
            own, boundary = self.saved.get(block, set()) - always - times.keys(), given - always
            unsaved = boundary - anywhere
            found[block] = Held(self._bytes(own | boundary - unsaved), self._bytes(boundary), self._bytes(unsaved))
        return found

    def _bytes(self, storages: Iterable[StorageWeakRef]) -> int:
        return sum(map(self.sizes.__getitem__, storages))

    def _met(self, tensor: Tensor) -> Iterable[StorageWeakRef]:
        found = {storage: size for storage, size in storage_of(tensor).items() if storage not in self.static}
        self.sizes.update(found)
        return found
