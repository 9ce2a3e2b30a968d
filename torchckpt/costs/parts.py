"""Parts: which calls in the forward of a stage are its blocks.

A block is an outermost region (``checkpoint``, ``checkpoint_module``, ``Checkpointing``). In a model without regions,
blocks are children of ``nn.Sequential``, ``nn.ModuleList`` and ``nn.ModuleDict`` whose class occurs more than once
among such children of all stages. A child that is a container, too, is a block only if its own children have different
classes, such as a convolution, a norm and an activation. Otherwise its children may be blocks. Blocks do not nest.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.options import Options
from torchckpt.regions.core.scope import Scope
from torchckpt.regions.saved import storage_of
from torchckpt.typing import Function

__all__ = ["Static", "Watcher", "repeated_children", "static_of", "watched"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Watcher(Protocol):
    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def leave(self) -> None: ...


class _Regions(Scope):
    """Tells a watcher when outermost regions start and end, and makes every region keep its saved tensors."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__(keep=True)
        self._watcher = watcher
        self._depth = 0

    def run(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> tuple[Any, Frame | None]:
        if not self._depth:
            self._watcher.enter(args, kwargs)
        self._depth += 1
        outputs = super().run(function, args, kwargs, options)
        self._depth -= 1
        if not self._depth:
            self._watcher.leave()
        return outputs


@contextmanager
def watched(watcher: Watcher, children: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """Inside this context, ``watcher`` is told of each block: each outermost region, or each call of ``children``."""
    with ExitStack() as stack:
        if children is None:
            stack.enter_context(_Regions(watcher).entered())
        else:
            stack.enter_context(Scope(keep=True).entered())
            for child in children:
                entering = child.register_forward_pre_hook(
                    lambda _, args, kwargs: watcher.enter(args, kwargs), with_kwargs=True, prepend=True
                )
                leaving = child.register_forward_hook(lambda *_: watcher.leave())
                stack.callback(entering.remove)
                stack.callback(leaving.remove)
        yield


def repeated_children(stages: Sequence[nn.Module]) -> list[nn.Module]:
    """The children of containers whose class occurs more than once among such children."""
    found: list[nn.Module] = []
    level: list[nn.Module] = list(stages)
    while level:
        children = [child for module in level for child in _in_containers(module)]
        counts = Counter(map(type, children))
        found += [child for child in children if counts[type(child)] > 1]
        level = [child for child in children if counts[type(child)] == 1]
    return list(dict.fromkeys(found))


def _in_containers(module: nn.Module) -> Iterator[nn.Module]:
    """The children of the outermost containers in ``module``, which may be one itself. A uniform container among these
    children is replaced by its own."""
    for child in module.children():
        if not isinstance(module, _CONTAINERS) or _is_uniform(child):
            yield from _in_containers(child)
        else:
            yield child


def _is_uniform(module: nn.Module) -> bool:
    kinds = list(map(type, module.children()))
    return isinstance(module, _CONTAINERS) and len(set(kinds)) < len(kinds)


_MASTER_BYTES, _MOMENTS_BYTES = 4, 8
"""Bytes of Adam's state in mixed precision: a float32 copy of a smaller parameter, and two float32 moments."""


@dataclass(frozen=True)
class Static:
    """Weights, their gradients, and the counts that decide the bytes of optimizer state.

    A gradient has the dtype of its parameter. A frozen parameter has no gradient and no optimizer state.
    """

    weight_bytes: int = 0
    grad_bytes: int = 0
    trained: int = 0
    """Elements of trained parameters."""
    below_float32: int = 0
    """Those of fewer than 4 bytes each."""

    def __add__(self, other: Static) -> Static:
        return Static(
            self.weight_bytes + other.weight_bytes,
            self.grad_bytes + other.grad_bytes,
            self.trained + other.trained,
            self.below_float32 + other.below_float32,
        )

    def total_bytes(self, optimizer_bytes: float | None = None) -> float:
        """Bytes of weights, gradients and optimizer state.

        >>> Static(weight_bytes=20, grad_bytes=20, trained=10, below_float32=10).total_bytes()
        160

        Args:
            optimizer_bytes: state of each trained element. Default: Adam's, 12 for one of two bytes, 8 for one of four.
        """
        state_bytes: float = _MOMENTS_BYTES * self.trained + _MASTER_BYTES * self.below_float32
        if optimizer_bytes is not None:
            state_bytes = optimizer_bytes * self.trained
        return self.weight_bytes + self.grad_bytes + state_bytes


def static_of(stage: nn.Module) -> dict[StorageWeakRef, Static]:
    """What each storage of a parameter or a buffer adds."""
    found: dict[StorageWeakRef, Static] = {}
    for parameter in stage.parameters():
        trained = parameter.numel() if parameter.requires_grad else 0
        below_float32 = trained if parameter.element_size() < 4 else 0
        _add(found, parameter, Static(0, trained * parameter.element_size(), trained, below_float32))
    for buffer in stage.buffers():
        _add(found, buffer, Static())
    return found


def _add(found: dict[StorageWeakRef, Static], tensor: Tensor, own: Static) -> None:
    """Add ``own`` to the storages of ``tensor``. Several parameters may be views of one storage; it counts once."""
    for storage, size in storage_of(tensor).items():
        found[storage] = found.get(storage, Static(size)) + own
