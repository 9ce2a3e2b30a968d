"""Live bytes: counts the bytes that the operators of one step allocate, and the peak of the bytes that are alive."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.distributed.private import TorchDispatchMode
from torchckpt.planning import Action
from torchckpt.planning.step.memory import Level
from torchckpt.regions.saved import storage_of
from torchckpt.tensors import tensors_in

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # in torch
    """While it is entered, it records the storages that operators make, and the peak bytes alive in each action.

    Storages from before the step do not count, nor those that no operator makes, such as receive buffers of messages.
    If the device has an allocator with statistics, the bytes come from it.

    Args:
        looks: whether to watch operators. Compiled code would not run compiled while operators are watched; with False
            every storage counts as made in the step.
        more_bytes: added to the levels of every action.
    """

    def __init__(self, device: torch.device, looks: bool = True, more_bytes: float = 0.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._looks, self._more_bytes = looks, more_bytes
        self._action: Action | None = None
        self._entered_bytes = 0.0
        self._made: dict[StorageWeakRef, int] = {}
        self._sum_bytes = self._highest_bytes = 0
        self._device = device
        self._allocator = _allocator_of(device)
        self._before_bytes = self._allocator.memory_allocated(device) if self._allocator else 0
        self.levels: dict[Action, Level] = {}

    def __contains__(self, storage: object) -> bool:
        """Whether ``storage`` was made in this step."""
        return storage in self._made or not self._looks

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A context around the step."""
        if self._looks:
            with self:
                yield
        else:
            yield
        self.reaches(None)

    def reaches(self, action: Action | None) -> None:
        """Note that ``action`` begins. It lasts until the next call; None ends the last action."""
        if self._action is not None and (self._looks or self._allocator):
            highest = self._highest()
            self._begin()
            amounts = highest, self._now(), self._entered_bytes
            self.levels[self._action] = Level(*(amount + self._more_bytes for amount in amounts))
        else:
            self._begin()
        self._action, self._entered_bytes = action, 0.0

    def replays(self) -> None:
        """Note that the current action starts a replay."""
        self._entered_bytes = self._entered_bytes or float(self._highest())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        fresh = self._storages_of(outputs)
        for storage in self._storages_of((args, kwargs)) if fresh else ():
            fresh.pop(storage, None)
        if fresh:
            self._made.update(fresh)
            self._sum_bytes += sum(fresh.values())
            if self._sum_bytes > self._highest_bytes:
                self._forget_the_dead()
                self._highest_bytes = max(self._highest_bytes, self._sum_bytes)
        return outputs

    def _storages_of(self, tree: Any) -> dict[StorageWeakRef, int]:
        """The storages of the tensors in ``tree`` that are not known yet, and their bytes."""
        sizes = {storage: size for tensor in tensors_in(tree) for storage, size in storage_of(tensor).items()}
        return {storage: size for storage, size in sizes.items() if storage not in self._made}

    def _forget_the_dead(self) -> None:
        alive = [storage for storage in self._made if not storage.expired()]  # type: ignore[no-untyped-call]  # likewise
        self._made = {storage: self._made[storage] for storage in alive}
        self._sum_bytes = sum(self._made.values())

    def _begin(self) -> None:
        if self._allocator:
            self._allocator.reset_peak_memory_stats(self._device)
        self._forget_the_dead()
        self._highest_bytes = self._sum_bytes

    def _now(self) -> int:
        if self._allocator:
            return int(self._allocator.memory_allocated(self._device)) - self._before_bytes
        return self._sum_bytes

    def _highest(self) -> int:
        if self._allocator:
            return int(self._allocator.max_memory_allocated(self._device)) - self._before_bytes
        return self._highest_bytes


_ASKED = ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats")


def _allocator_of(device: torch.device) -> Any:
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    return module if all(hasattr(module, name) for name in _ASKED) else None
