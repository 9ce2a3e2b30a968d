"""Parts: which calls in the forward of a stage are its blocks.

A block is an outermost region (``checkpoint``, ``checkpoint_module``, ``Checkpointing``). In a model without regions,
blocks are children of ``nn.Sequential``, ``nn.ModuleList`` and ``nn.ModuleDict`` whose class occurs more than once
among such children of all stages. A child that is a container, too, is a block only if its own children have different
classes, such as a convolution, a norm and an activation. Otherwise its children may be blocks. Blocks do not nest.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.options import Options
from torchckpt.regions.core.scope import Scope
from torchckpt.regions.saved import storage_of
from torchckpt.typing import Function

__all__ = ["repeated_children", "static_of", "watched"]

Enter: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], None]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class _Regions(Scope):
    """Tells when outermost regions start and end, and makes every region keep its saved tensors."""

    def __init__(self, enter: Enter, leave: Callable[[], None]) -> None:
        super().__init__(keep=True)
        self._enter, self._leave = enter, leave
        self._depth = 0

    def run(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> tuple[Any, Frame | None]:
        if not self._depth:
            self._enter(args, kwargs)
        self._depth += 1
        outputs = super().run(function, args, kwargs, options)
        self._depth -= 1
        if not self._depth:
            self._leave()
        return outputs


@contextmanager
def watched(enter: Enter, leave: Callable[[], None], children: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """Inside this context, ``enter`` and ``leave`` are called around each block: each outermost region, or each call of
    ``children``."""
    with ExitStack() as stack:
        if children is None:
            stack.enter_context(_Regions(enter, leave).entered())
        else:
            stack.enter_context(Scope(keep=True).entered())
            for child in children:
                entering = child.register_forward_pre_hook(
                    lambda _, args, kwargs: enter(args, kwargs), with_kwargs=True, prepend=True
                )
                leaving = child.register_forward_hook(lambda *_: leave())
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


def static_of(stage: nn.Module, optimizer_bytes: float | None = None) -> dict[StorageWeakRef, float]:
    """The bytes of weights, gradients and optimizer state, by the storage of the parameter or buffer.

    A gradient has the dtype of its parameter. A frozen parameter has no gradient and no optimizer state.

    >>> sum(static_of(nn.Linear(5, 1, bias=False, dtype=torch.bfloat16)).values())
    80

    Args:
        optimizer_bytes: state of each trained element. Default: Adam's, 12 for one of two bytes, 8 for one of four.
    """
    sizes: dict[StorageWeakRef, float] = {}
    for tensor in (*stage.parameters(), *stage.buffers()):
        state_bytes: float = _MOMENTS_BYTES + (_MASTER_BYTES if tensor.element_size() < 4 else 0)
        if optimizer_bytes is not None:
            state_bytes = optimizer_bytes
        is_trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        added_bytes = tensor.numel() * (tensor.element_size() + state_bytes) if is_trained else 0
        for storage, size in storage_of(tensor).items():
            sizes[storage] = sizes.get(storage, size) + added_bytes  # several may be views of one storage
    return sizes
