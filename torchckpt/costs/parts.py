"""Parts: the blocks of a stage, and what is before and after them, as they run.

A block is an outermost region (``checkpoint``, ``checkpoint_module``, ``Checkpointing``). In a model without regions,
blocks are children of ``nn.Sequential``, ``nn.ModuleList`` and ``nn.ModuleDict`` whose class occurs more than once
among such children of all stages. A child that is a container, too, is a block only if its own children have different
classes, such as a convolution, a norm and an activation. Otherwise its children may be blocks. Blocks do not nest.
"""
from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from torchckpt.costs.operation import AFTER, BEFORE
from torchckpt.regions.core.scope import Scope
from torchckpt.regions.private import newest_node, number_of
from torchckpt.tensors import tensors_in
from torchckpt.typing import Function

__all__ = ["Parts", "RegionSeen", "repeated_children"]


class Parts(Scope):
    """Follows the forward of a stage, part by part, whose regions keep what they save. What follows it extends the
    methods."""

    def __init__(self) -> None:
        super().__init__(keep=True)
        self.blocks = 0
        """The number of blocks that have begun."""
        self.inputs: list[Tensor] = []
        """Inputs of blocks that need a gradient."""
        self._starts: list[tuple[int, int]] = [(-1, BEFORE)]  # the number of a node, and the part from there on
        self._refuses_regions = False

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The next block begins."""
        tensors = tensors_in((args, kwargs))
        self.inputs += [tensor for tensor in tensors if tensor.requires_grad and not isinstance(tensor, nn.Parameter)]
        self.begins(self.blocks)
        self.blocks += 1

    def leave(self) -> None:
        """The current block ends."""
        self.begins(AFTER)

    def begins(self, part: int) -> None:
        self._starts.append((newest_node() + 1, part))

    def wrapped(self, number: int, function: Function) -> Function:
        if self._refuses_regions:
            raise RegionSeen
        return partial(self._region, function)

    def _region(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        self.enter(args, kwargs)
        outputs = function(*args, **kwargs)
        self.leave()
        return outputs

    def follow(self, nodes: Iterable[Node]) -> None:
        """Have each node of the backward tell, before it runs, which part made it."""
        for node in nodes:
            place = bisect_right(self._starts, number_of(node), key=lambda start: start[0]) - 1
            node.register_prehook(partial(self.reaches, self._starts[place][1]))

    def reaches(self, part: int, *_: object) -> None:
        """The backward comes to a part."""

    @contextmanager
    def watched(self, children: Sequence[nn.Module] | None) -> Iterator[None]:
        """A context around the forward, with :meth:`enter` and :meth:`leave` around each block. ``children``: the
        modules whose calls are blocks; None where regions are."""
        self._refuses_regions = children is not None
        with ExitStack() as stack:
            stack.enter_context(self.entered())
            for child in children or ():
                entering = child.register_forward_pre_hook(
                    lambda _, args, kwargs: self.enter(args, kwargs), with_kwargs=True, prepend=True
                )
                leaving = child.register_forward_hook(lambda *_: self.leave())
                stack.callback(entering.remove)
                stack.callback(leaving.remove)
            yield


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class RegionSeen(Exception):
    """Raised at the first region where blocks are children: the blocks of all stages are regions then."""


def repeated_children(stages: Sequence[nn.Module]) -> list[nn.Module]:
    """The children of containers whose class occurs more than once among such children."""
    repeated: list[nn.Module] = []
    level: list[nn.Module] = list(stages)
    while level:
        children = [child for module in level for child in _in_containers(module)]
        counts = Counter(map(type, children))
        repeated += [child for child in children if counts[type(child)] > 1]
        level = [child for child in children if counts[type(child)] == 1]
    return list(dict.fromkeys(repeated))


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
