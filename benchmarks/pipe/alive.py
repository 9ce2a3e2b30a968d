"""Alive: how many bytes of tensors are, on the CPU."""
from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Alive"]


class Alive(TorchDispatchMode):
    """Counts each storage from the operation that makes it until nobody holds it. What was there before does not count.

    Exact where one thread does all, as in a pipeline whose stages are on the CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()  # ids of storages that live

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._meet((args, kwargs), counted=False)
        outputs = operation(*args, **kwargs)
        self._meet(outputs, counted=True)
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return outputs

    def _meet(self, values: Any, counted: bool) -> None:
        for tensor in pytree.tree_leaves(values):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in self._known:
                self._enter(tensor.untyped_storage(), counted)

    def _enter(self, storage: torch.UntypedStorage, counted: bool) -> None:
        number, size = id(storage), storage.nbytes() if counted else 0
        self._known.add(number)
        self.bytes += size
        weakref.finalize(storage, self._leave, number, size)

    def _leave(self, number: int, size: int) -> None:
        self._known.remove(number)
        self.bytes -= size
