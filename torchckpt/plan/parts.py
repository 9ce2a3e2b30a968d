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
from typing import Any, Protocol

from torch import nn

from torchckpt.kernel.region.frame import Frame
from torchckpt.kernel.region.options import Options
from torchckpt.kernel.region.scope import Scope
from torchckpt.typing import Function

__all__ = ["Watcher", "repeated_children", "watched"]

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
