"""Memory: bytes that a stage keeps for its backward, and bytes alive during a step."""
from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchckpt.testing import saved_bytes

from .variants import Variant

__all__ = ["Curve", "LiveBytes", "bytes_alive", "kept_bytes"]


def kept_bytes(variant: Variant, x: Tensor) -> list[int]:
    """Bytes that each stage keeps between its forward and its backward.

    Each storage that autograd saves while the stage runs all its micro-batches counts once: activations, or the inputs
    of regions. Parameters do not count.
    """
    kept = []
    for stage in variant.stages():
        with saved_bytes() as saved:
            x = stage(x)
        kept.append(saved.total)
    return kept


@dataclass(frozen=True)
class Curve:
    """Bytes of activations and gradients alive, after each operation of a forward and of its backward."""

    forward: list[int]
    backward: list[int]

    @property
    def peak(self) -> int:
        return max(self.forward + self.backward)


def bytes_alive(variant: Variant, batch: tuple[Tensor, Tensor], seed: int) -> Curve:
    """Run a forward and its backward. Earlier allocations, such as parameters, do not count."""
    variant.optimizer.zero_grad()
    ledger = LiveBytes() if batch[0].device.type == "cpu" else AllocatedBytes()
    with ledger:
        loss = variant.loss(batch, seed)
    turn = len(ledger.curve)
    with ledger:
        loss.backward()
    return Curve(ledger.curve[:turn], ledger.curve[turn:])


class LiveBytes(TorchDispatchMode):
    """Counts each storage from the operation that makes it until it is freed. Exact if all runs in one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.curve: list[int] = []
        self.alive_bytes = 0
        self._known: set[int] = set()  # ids of living storages, also of those from before

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._meet((args, kwargs), counted=False)
        outputs = operation(*args, **kwargs)
        self._meet(outputs, counted=True)
        self.curve.append(self.alive_bytes)
        return outputs

    def _meet(self, values: Any, counted: bool) -> None:
        for tensor in pytree.tree_leaves(values):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in self._known:
                self._enter(tensor.untyped_storage(), counted)

    def _enter(self, storage: torch.UntypedStorage, counted: bool) -> None:
        number, size = id(storage), storage.nbytes() if counted else 0
        self._known.add(number)
        self.alive_bytes += size
        weakref.finalize(storage, self._leave, number, size)

    def _leave(self, number: int, size: int) -> None:
        self._known.remove(number)
        self.alive_bytes -= size


class AllocatedBytes(TorchDispatchMode):
    """Asks the accelerators' allocators after each operation, and in threads without this mode after each module."""

    def __init__(self) -> None:
        super().__init__()
        self.curve: list[int] = []
        self._before = _allocated()

    def __enter__(self) -> Any:
        self._hook = register_module_forward_hook(lambda *_: self._look())
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._hook.remove()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = operation(*args, **(kwargs or {}))
        self._look()
        return outputs

    def _look(self) -> None:
        self.curve.append(_allocated() - self._before)


def _allocated() -> int:
    return sum(torch.accelerator.memory_allocated(device) for device in range(torch.accelerator.device_count()))
