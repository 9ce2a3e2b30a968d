"""Holdings: which bytes a stage keeps from a forward for its backward, and for the sake of which of its blocks.

A storage counts once. One that a block is given is kept whatever becomes of that block: its boundary. One that several
blocks are given, or that something outside of blocks saves, or that a block closes over, is kept whatever becomes of
any block. What is left is what a block made and saved itself, and is not there where the block is recomputed.
Parameters and buffers are there anyway, and do not count.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.kernel.saved import storage_of
from torchckpt.plan.ledger import AFTER, BEFORE

__all__ = ["Held", "Holdings"]


@dataclass(frozen=True)
class Held:
    """Bytes; of what is no block, both are the same."""

    saved_bytes: int
    boundary_bytes: int


@dataclass
class Holdings:
    """Of one forward. Give it the tensors as they come, then ask ``found``."""

    static: Collection[StorageWeakRef]
    sizes: dict[StorageWeakRef, int] = field(default_factory=dict)
    given: list[set[StorageWeakRef]] = field(default_factory=list)
    """By block."""
    saved: dict[int, set[StorageWeakRef]] = field(default_factory=dict)
    """By part."""

    def give(self, tensors: Iterable[Tensor]) -> None:
        """To a block, the next one."""
        self.given.append({storage for tensor in tensors for storage in self._met(tensor)})

    def save(self, part: int, tensor: Tensor) -> None:
        self.saved.setdefault(part, set()).update(self._met(tensor))

    def found(self, makers: dict[StorageWeakRef, int]) -> dict[int, Held]:
        """By part.

        Args:
            makers: the part that made a storage.
        """
        times = Counter(storage for given in self.given for storage in given)
        outside = {part: set(self.saved.get(part, ())) for part in (BEFORE, AFTER)}
        outside[BEFORE] |= {storage for storage, count in times.items() if count > 1}
        for block in range(len(self.given)):
            strange = {one for one in self.saved.get(block, ()) if makers.get(one, BEFORE) != block} - times.keys()
            outside[BEFORE] |= strange
        outside[AFTER] -= outside[BEFORE]
        always = outside[BEFORE] | outside[AFTER]
        found = {part: self._held(storages, storages) for part, storages in outside.items()}
        for block, given in enumerate(self.given):
            own = self.saved.get(block, set()) - always - times.keys()
            found[block] = self._held(own | given - always, given - always)
        return found

    def _held(self, saved: set[StorageWeakRef], boundary: set[StorageWeakRef]) -> Held:
        return Held(sum(map(self.sizes.__getitem__, saved)), sum(map(self.sizes.__getitem__, boundary)))

    def _met(self, tensor: Tensor) -> Iterable[StorageWeakRef]:
        found = {storage: size for storage, size in storage_of(tensor).items() if storage not in self.static}
        self.sizes.update(found)
        return found
