"""Parts: the blocks of a stage, and what is before and after them, as they run.

A block is an outermost region (``checkpoint``, ``checkpoint_module``, ``Checkpointing``). In a model without regions,
blocks are children of ``nn.Sequential``, ``nn.ModuleList`` and ``nn.ModuleDict`` whose class occurs more than once
among such children of all stages. A child that is a container, too, is a block only if its own children have different
classes, such as a convolution, a norm and an activation. Otherwise its children may be blocks. Blocks do not nest.
"""
from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

from torchckpt.costs.operation import AFTER, BEFORE
from torchckpt.costs.private import gathering_of
from torchckpt.modules import OF_EVERY_MODULE, module_of
from torchckpt.regions.core.scope import Scope
from torchckpt.regions.private import newest_node, number_of
from torchckpt.tensors import inner_tensors, tensors_in
from torchckpt.typing import Function

__all__ = ["Parts", "RegionSeen", "Repeats", "repeated_children"]


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
        """A part begins."""
        self._starts.append((newest_node() + 1, part))

    def call(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        """Call a block that was entered."""
        return function(*args, **kwargs)

    def wrapped(self, number: int, function: Function) -> Function:
        if self._refuses_regions:
            raise RegionSeen
        return partial(self._region, function)

    def _region(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        self.enter(args, kwargs)
        outputs = self.call(function, *args, **kwargs)
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
        """A context around the forward, with :meth:`enter` and :meth:`leave` around each block, and :meth:`call` in its
        place. ``children``: the modules whose calls are blocks; None where regions are."""
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
                if "forward" not in vars(child):
                    child.forward = partial(self.call, child.forward)
                    stack.callback(vars(child).pop, "forward")
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


# blocks that are not run ----------------------------------------------------------------------------------------------


class Repeats:
    """Which blocks of a stage are like which.

    Two of a kind are run: with the second, what FSDP2 has gathered at once is settled. Later ones are like the second.
    Blocks are of a kind if their modules, plain attributes, hooks, parameters and arguments are alike, but for the
    values of tensors.
    """

    def __init__(self) -> None:
        self.like: dict[int, int] = {}
        """By the number of a block that was not run, the number of the one that was."""
        self._parts: defaultdict[Hashable, list[int]] = defaultdict(list)
        self._outputs: dict[Hashable, Any] = {}
        self._parameters: set[int] = set()

    def run(self, part: int, function: Any, args: Any, kwargs: Any, stands: Callable[[int, Any], bool]) -> Any:
        """Call ``function`` as block ``part``, or return tensors like those that one of its kind returned. ``stands``:
        whether a block can stand for others, by its number and what it returned."""
        module = module_of(function)
        parameters = set() if module is None else {id(parameter) for parameter in module.parameters()}
        if module is None or parameters & self._parameters:
            return function(*args, **kwargs)
        self._parameters |= parameters
        key = _kind_of(module), _kinds_of((args, kwargs))
        parts = self._parts[key]
        if len(parts) > 1 and stands(parts[1], self._outputs[key]):
            self.like[part] = parts[1]
            return _like(self._outputs[key], tensors_in((args, kwargs)))
        self._outputs[key] = outputs = function(*args, **kwargs)
        parts.append(part)
        return outputs


def _like(outputs: Any, inputs: list[Tensor]) -> Any:
    """New tensors in the places of ``outputs``, which depend on ``inputs``."""
    graded = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    start = torch.empty((), requires_grad=True)  # so that what is returned needs a gradient, whatever the inputs need
    new = iter(_Like.apply(graded, start, *inputs) if graded else ())  # type: ignore[no-untyped-call]  # in torch

    def like(tensor: Tensor) -> Any:
        return next(new) if tensor.requires_grad else torch.empty_like(tensor)

    return pytree.tree_map_only(Tensor, like, outputs)


class _Like(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: list[Tensor], _: Tensor, *inputs: Tensor) -> Any:
        ctx.inputs = inputs
        return tuple(torch.empty_like(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, None, *(torch.empty_like(tensor) if tensor.requires_grad else None for tensor in ctx.inputs)


def _kind_of(module: nn.Module) -> Hashable:
    """Its modules, and of each the plain attributes, the names of hooks, how FSDP2 gathers, parameters and buffers."""
    kinds: list[Any] = []
    for name, inner in module.named_modules():
        kinds += [name, type(inner), _kinds_of((inner._parameters, inner._buffers))]
        for key, value in vars(inner).items():
            if key.startswith("__composable_api_state_key"):
                value = tuple(map(gathering_of, value.values()))
            elif key in OF_EVERY_MODULE and isinstance(value, dict):
                value = tuple(getattr(hook, "__qualname__", type(hook)) for hook in value.values())
            if key not in ("_parameters", "_buffers", "_modules", "forward"):
                kinds.append((key, _hashable(value)))
    return tuple(kinds)


def _kinds_of(tree: Any) -> Hashable:
    leaves, spec = pytree.tree_flatten(tree)
    return str(spec), tuple(map(_hashable, leaves))


def _hashable(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        shares = tuple((type(share), share.shape, share.stride(), share.dtype) for share in inner_tensors(value))
        return type(value), value.requires_grad, str(getattr(value, "placements", "")), shares
    return str(value) if isinstance(value, (list, set, dict)) else value if isinstance(value, Hashable) else id(value)
