"""Live: the bytes that are alive, and the most of them since the last look: an allocator's, or of watched operators."""
from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.regions.private import DispatchMode, alive_storage
from torchckpt.regions.saved import bytes_of, storages_of
from torchckpt.tensors import tensors_in

__all__ = ["LiveStorages", "allocator_of", "ooms_of"]


class LiveStorages(DispatchMode):
    """While it is entered, it records the storages that operators make, and the peak bytes that are alive.

    Storages from before do not count, nor those that no operator makes, such as receive buffers of messages. If the
    device has an allocator with statistics, the bytes come from it.

    Args:
        looks: whether to watch operators. Compiled code would not run compiled while operators are watched; with False
            every storage counts as made here.
        parameters, inputs: of the step that begins, for :meth:`lost`; the former tell whether FSDP2 resizes storages.
    """

    supports_higher_order_operators = True
    """Else torch refuses to run ``torch.cond`` and the like while it is entered."""

    def __init__(self, device: torch.device, looks: bool = True, parameters: Any = (), inputs: Any = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.looks = looks
        self._made: dict[StorageWeakRef, int] = {}
        self._watched: dict[weakref.ref[torch.UntypedStorage], StorageWeakRef] = {}
        self._freed: list[weakref.ref[torch.UntypedStorage]] = []
        """Those that were freed since an operator last made one."""
        self._are_resized = self.is_sharded = any(hasattr(parameter, "device_mesh") for parameter in parameters)
        """Whether storages become smaller where no operator does it, as those of FSDP2, so that all are looked at."""
        self._sum_bytes = self._highest_bytes = 0
        self._device = device
        self.allocator = allocator_of(device)
        self._before_bytes = self.allocator.memory_allocated(device) if self.allocator else 0
        self._gradient_bytes = self._bytes_of_gradients(parameters)
        self._inputs = storages_of(each for each in tensors_in(inputs) if each.device == device)

    def watching(self) -> AbstractContextManager[object]:
        """Inside the block operators are watched, if they may be."""
        return self if self.looks else nullcontext()

    def __contains__(self, storage: object) -> bool:
        """Whether ``storage`` was made here."""
        return storage in self._made or not self.looks

    def begin(self) -> None:
        """From now on :meth:`highest` is that of what follows."""
        if self.allocator:
            self.allocator.reset_peak_memory_stats(self._device)
        self._look()
        self._highest_bytes = self._sum_bytes

    def include(self, tensors: Sequence[Tensor]) -> None:
        """Count ``tensors`` as made here, though they were there before."""
        if self.allocator:
            self._before_bytes -= bytes_of(tensors)
        else:
            self.note(tensors)

    def forget(self) -> None:
        """Let storages that operators made so far be from before. An allocator's bytes stay as they are. What autocast
        holds of them is made again."""
        torch.clear_autocast_cache()
        self._made.clear()
        self._sum_bytes = self._highest_bytes = 0

    def now(self) -> int:
        """The bytes alive, beyond those before. Call it right after :meth:`begin`."""
        if self.allocator:
            return int(self.allocator.memory_allocated(self._device)) - self._before_bytes
        return self._sum_bytes

    def highest(self) -> int:
        """The most bytes since :meth:`begin`."""
        if self.allocator:
            return int(self.allocator.max_memory_allocated(self._device)) - self._before_bytes
        self._look()
        return self._highest_bytes

    def lost(self, parameters: Iterable[Tensor]) -> int:
        """After a step: what it freed from before it, beside its inputs, less what it leaves beside gradients."""
        freed = sum(size for storage, size in self._inputs.items() if alive_storage(storage) is None)
        lost = self._bytes_of_gradients(parameters) - self._gradient_bytes - freed - self.now()
        return max(0, lost) if self.allocator else 0

    def _bytes_of_gradients(self, parameters: Iterable[Tensor]) -> int:
        own = [each for each in parameters if each.is_leaf and each.device == self._device]
        found = [each.grad for each in own if each.grad is not None]
        return bytes_of(each for each in found if each._base is None)  # those of DDP are views of its buckets

    def note(self, tree: Any, besides: Any = None) -> None:
        """Count the storages in ``tree`` that are not known, and not in ``besides``, as made here."""
        found = storages_of(tensors_in(tree)).items()
        fresh = {storage: size for storage, size in found if self._made.get(storage) != size}
        before = storages_of(tensors_in(besides)) if fresh else {}
        self._add({one: size for one, size in fresh.items() if one in self._made or one not in before})

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call the operator ``func``. The storages that it makes count, and those that it makes larger."""
        inputs = args, *(kwargs or {}).values()
        before = storages_of(tensors_in(inputs)) if _may_grow(func) else {}
        outputs = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.lift_fresh.default:  # no operator has made its input; that of NumPy is borrowed
            self.note([one for one in tensors_in(outputs) if one.untyped_storage().resizable()])
        else:
            self.note(outputs, inputs)
        if before:
            after = storages_of(tensors_in(inputs)).items()
            self._add({one: size for one, size in after if size > self._made.get(one, before.get(one, size))})
        return outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs)

    def _add(self, sizes: dict[StorageWeakRef, int]) -> None:
        while self._freed:
            self._sum_bytes -= self._made.pop(self._watched.pop(self._freed.pop()), 0)
        for storage, size in sizes.items():
            if storage not in self._made:
                self._watched[weakref.ref(alive_storage(storage), self._freed.append)] = storage
            self._sum_bytes += size - self._made.get(storage, 0)
            self._made[storage] = size
        if self._sum_bytes > self._highest_bytes and self._are_resized:
            self._look()
        self._highest_bytes = max(self._highest_bytes, self._sum_bytes)

    def _look(self) -> None:
        made = {one: found.nbytes() for one in self._made if (found := alive_storage(one)) is not None}
        self._are_resized |= any(size != self._made[storage] for storage, size in made.items())
        self._made, self._sum_bytes = made, sum(made.values())
        self._highest_bytes = max(self._highest_bytes, self._sum_bytes)


@functools.cache
def _may_grow(func: Any) -> bool:
    """Whether the operator can make the storage of an argument larger. Of torch's own, ``add_`` and the like cannot."""
    schema = getattr(func, "_schema", None)  # a higher-order operator has none
    if schema is None or not schema.is_mutable:
        return False
    is_out = any(one.kwarg_only and one.alias_info is not None for one in schema.arguments)
    return is_out or torch.Tag.inplace_view in func.tags or func.namespace != "aten"


_ASKED = ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats")


def allocator_of(device: torch.device) -> Any:
    """The module that counts the bytes of ``device``; None if there is none."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    if not all(hasattr(module, name) for name in _ASKED):
        return None
    if hasattr(module, "init"):
        module.init()  # CUDA resets no statistics of a device that was never used
    return module


def ooms_of(device: torch.device) -> int:
    """How often the device was out of memory, if it counts that; not where it found some after freeing its cache."""
    allocator = allocator_of(device)
    for name in ("memory_stats_as_nested_dict", "memory_stats"):  # the first one takes less time
        if hasattr(allocator, name):
            return int(getattr(allocator, name)(device).get("num_ooms", 0))
    return 0
