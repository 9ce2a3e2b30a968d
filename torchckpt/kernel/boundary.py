"""Boundary: the arguments of a region, all that stays in memory between its forward and its replay."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchckpt.kernel.private import hooks_in_force

__all__ = ["Boundary"]

_LEAVES = frozenset(
    {Tensor, torch.nn.Parameter, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device}
)


class Boundary:
    """The arguments of one call. Their tensors are saved as autograd saves: through the hooks in force, or else held,
    and checked for changes in place when they are read.

    An autograd Function with ``save_for_backward`` would do the same, and make a node of the graph for it: a fifth of
    the cost of a region of tiny operations.
    """

    __slots__ = ("_leaves", "_saved", "_spec", "_unpack")

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._spec: pytree.TreeSpec | None
        flat = not kwargs and _LEAVES.issuperset(map(type, args))  # most calls are, and need no tree
        leaves, self._spec = (list(args), None) if flat else pytree.tree_flatten((args, dict(kwargs)))
        # An inference tensor cannot change, and cannot be saved: it is an argument like any other.
        hooks = hooks_in_force(False)
        pack, self._unpack = (torch.no_grad()(hooks[0]), hooks[1]) if hooks else (Tensor.detach, None)
        self._saved: list[tuple[int, bool, int]] = []
        for place, leaf in enumerate(leaves):
            # An inference tensor cannot change, and cannot be saved: it is an argument like any other.
            if isinstance(leaf, Tensor) and not leaf.is_inference():
                self._saved.append((place, leaf.requires_grad, leaf._version))
                leaves[place] = pack(leaf)
        self._leaves = leaves

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """``(args, kwargs)`` for a replay, and the tensors in them, detached from the graph that they came from.

        Raises ``RuntimeError``, as eager autograd does, if one was changed in place since.
        """
        leaves = self._leaves.copy()
        tensors = []
        for place, requires_grad, version in self._saved:
            tensor = leaves[place]
            if self._unpack is not None:
                tensor = self._unpack(tensor).detach()
            elif tensor._version != version:
                raise RuntimeError(_changed(tensor, version))
            leaves[place] = tensor.requires_grad_() if requires_grad else tensor
            tensors.append(tensor)
        if self._spec is None:
            return tuple(leaves), {}, tensors
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs, tensors


def _changed(tensor: Tensor, version: int) -> str:
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: an input of a "
        f"checkpointed region, [{tensor.type()} {list(tensor.shape)}], is at version {tensor._version}; expected "
        f"version {version} instead. The replay would start from the changed input.\n"
        "  works:    the operation out of place, such as x = x + 1 instead of x.add_(1)"
    )
