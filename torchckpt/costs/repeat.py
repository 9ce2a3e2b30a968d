"""Repeat: a block that is like two before it is not run. What the two cost stands for it."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchckpt.costs.private import gathering_of
from torchckpt.modules import OF_EVERY_MODULE, module_of
from torchckpt.tensors import inner_tensors, tensors_in

__all__ = ["Repeats"]


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
