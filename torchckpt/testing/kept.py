"""Kept: the storages that autograd keeps during a step, when it keeps each, and where each was saved first."""
from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.regions.places import Place, operation_of, place_of
from torchckpt.regions.private import is_fake, keep_from_dynamo, kept_by_policies, look_through, number_of, running_node
from torchckpt.regions.saved import SavedBytes, storage_of
from torchckpt.tensors import nodes_behind

__all__ = ["KeptStorages", "storages_alive"]

class _SavedTensor:
    """What autograd holds in place of a saved tensor, as long as it holds it."""

    def __init__(self, tensor: Tensor, changes: list[tuple[StorageWeakRef, int]], *storages: StorageWeakRef) -> None:
        self.tensor, self._changes, self._storages = tensor, changes, storages
        changes.extend((storage, 1) for storage in storages)

    def __del__(self) -> None:
        self._changes.extend((storage, -1) for storage in self._storages)


class KeptStorages(SavedBytes):
    """While it is entered, it records what autograd and torch's selective policies keep in this thread.

    Storages of ``before`` do not count; by default those that are there when the first tensor is saved, but for results
    of differentiable operations."""

    def __init__(self, before: Set[StorageWeakRef] | None = None) -> None:
        super().__init__()
        self.restart(before)

    def restart(self, before: Set[StorageWeakRef] | None = None) -> None:
        """Forget everything, and record another step."""
        self._before = before
        self._storages.clear()
        self._changes: list[tuple[StorageWeakRef, int]] = []  # 1 where a saved tensor comes, -1 where it goes
        self._places: dict[StorageWeakRef, Place] = {}
        self.operations: dict[int, str] = {}
        """Operations by the numbers of their autograd nodes."""

    @property
    def before_bytes(self) -> int:
        """The bytes that autograd kept of storages that do not count. Parameters are not among them."""
        return sum(self._storages.values()) - sum(self._storages[storage] for storage in self._places)

    @contextmanager
    def entered(self) -> Iterator[None]:
        with saved_tensors_hooks(self._pack, self._unpack), kept_by_policies(self._saved):
            yield

    def at_peak(self) -> list[tuple[Place, int]]:
        """The place and the bytes of each storage that autograd kept when it kept the most bytes."""
        holders: Counter[StorageWeakRef] = Counter()
        now_bytes = most_bytes = end = 0
        for index, (storage, change) in enumerate(self._changes, 1):
            holders[storage] += change
            if holders[storage] == max(change, 0):  # the first holder has come, or the last one has gone
                now_bytes += change * self._storages[storage]
            if now_bytes > most_bytes:
                most_bytes, end = now_bytes, index
        holders.clear()
        for storage, change in self._changes[:end]:
            holders[storage] += change
        return [(self._places[storage], self._storages[storage]) for storage, count in holders.items() if count]

    def learn(self, node: Node | None) -> None:
        """Note the names of ``node`` and of all nodes behind it."""
        for new in nodes_behind([node], lambda node: number_of(node) not in self.operations):
            self.operations[number_of(new)] = operation_of(new.name())

    def _pack(self, tensor: Tensor) -> Any:
        if is_fake():  # of a trace
            return _SavedTensor(tensor, self._changes)
        self.learn(tensor.grad_fn)
        return self._saved(tensor, sys._getframe(1))

    def _unpack(self, saved: _SavedTensor) -> Tensor:
        self.learn(running_node())
        return saved.tensor

    def _saved(self, tensor: Tensor, caller: FrameType | None = None) -> _SavedTensor:
        if self._before is None:
            self._before = storages_alive(activations=False)
        saved = super()._pack(tensor)
        new = self._storages.keys() & storage_of(tensor).keys() - self._before
        for storage in new - self._places.keys():
            self._places[storage] = place_of(caller or sys._getframe())
        return _SavedTensor(saved, self._changes, *new)


keep_from_dynamo(KeptStorages._pack, KeptStorages._unpack)
look_through(KeptStorages._pack)


def storages_alive(activations: bool = True) -> set[StorageWeakRef]:
    """The storages of all tensors that the garbage collector tells of: none that ``gc.freeze()`` hides."""
    storages: set[StorageWeakRef] = set()
    for tensor in gc.get_objects():
        if issubclass(type(tensor), Tensor):
            with suppress(Exception):  # a parameter of a lazy layer has no storage yet
                storages.update(storage_of(tensor) if activations or tensor.grad_fn is None else ())
    return storages
