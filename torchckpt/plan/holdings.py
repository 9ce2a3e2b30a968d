"""Holdings: the bytes that a stage keeps from its forward for its backward, and the block that each byte belongs to.

A storage counts once. The input of a block is its boundary: it is kept whether or not the block is recomputed. A
storage is kept in every plan if it is an input of several blocks, is saved by code outside of blocks, or is used by a
block that did not receive it as an argument. All other storages were made and saved by one block, and are freed if that
block is recomputed. Parameters and buffers do not count, because they are always in memory.
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
