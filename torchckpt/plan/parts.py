"""Parts: which calls in the forward of a stage are its blocks.

A block is an outermost region (``checkpoint``, ``checkpoint_module``, ``Checkpointing``). A model without regions has
blocks where it repeats itself: the children of ``nn.Sequential``, ``nn.ModuleList`` and ``nn.ModuleDict`` whose class
occurs more than once among such children, over all stages. A container among such children is a block if its own
children are of different classes, as a convolution, a norm and an activation are; otherwise its children are looked at.
What is inside a block is part of it.
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
    """Tells of the outermost regions, and has each of them keep what it saves."""

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
    """Within, ``watcher`` is told of each block: of regions; or of calls of ``children``, where regions are part of
    what they are in."""
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
    """Children of containers, whose class occurs more than once among them."""
    found: list[nn.Module] = []
    level: list[nn.Module] = list(stages)
    while level:
        children = [child for module in level for child in _in_containers(module)]
        counts = Counter(map(type, children))
        found += [child for child in children if counts[type(child)] > 1]
        level = [child for child in children if counts[type(child)] == 1]
    return list(dict.fromkeys(found))


def _in_containers(module: nn.Module) -> Iterator[nn.Module]:
    """The children of the outermost containers in ``module``, itself included, and of uniform containers in those."""
    for child in module.children():
        if not isinstance(module, _CONTAINERS) or _is_uniform(child):
            yield from _in_containers(child)
        else:
            yield child


def _is_uniform(module: nn.Module) -> bool:
    kinds = list(map(type, module.children()))
    return isinstance(module, _CONTAINERS) and len(set(kinds)) < len(kinds)
