"""Boundary: the arguments of a region, all that stays in memory between its forward and its replay."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchckpt.kernel.private import hooks_in_force

__all__ = ["Boundary"]

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})


class Boundary:
    """The arguments of one call. Their tensors are saved as autograd saves: through the hooks in force, or else held,
    and checked for changes in place when they are read.

    An autograd Function with ``save_for_backward`` would do the same, and make a node of the graph for it: a fifth of
    the cost of a region of tiny operations.
    """

    __slots__ = ("_saved", "_spec", "_unpack")

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._spec: pytree.TreeSpec | None
        leaves, self._spec = (args, None) if _are_leaves(args, kwargs) else pytree.tree_flatten((args, dict(kwargs)))
        hooks = hooks_in_force(False)
        pack, self._unpack = (torch.no_grad()(hooks[0]), hooks[1]) if hooks else (Tensor.detach, None)
        self._saved: list[tuple[Any, int | None, bool]] = []  # what is kept, a tensor's version, and requires_grad
        for leaf in leaves:
            # An inference tensor cannot change, and cannot be saved: it is an argument like any other.
            if isinstance(leaf, Tensor) and not leaf.is_inference():
                self._saved.append((pack(leaf), leaf._version, leaf.requires_grad))
            else:
                self._saved.append((leaf, None, False))

    def arguments(self) -> tuple[Sequence[Any], dict[str, Any], list[Tensor]]:
        """``(args, kwargs)`` for a replay, and the tensors in them, detached from the graph that they came from.

        Raises ``RuntimeError``, as eager autograd does, if one was changed in place since.
        """
        leaves, tensors = [], []
        for leaf, version, requires_grad in self._saved:
            if version is not None:
                if self._unpack is not None:
                    leaf = self._unpack(leaf).detach()
                elif leaf._version != version:
                    raise RuntimeError(_changed(leaf, version))
                if requires_grad:
                    leaf.requires_grad_()
                tensors.append(leaf)
            leaves.append(leaf)
        if self._spec is None:
            return leaves, {}, tensors
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs, tensors


def _are_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    # Those of most calls are, and need no tree.
    for arg in args:
        if not isinstance(arg, Tensor) and type(arg) not in _ATOMS:
            return False
    return not kwargs


def _changed(tensor: Tensor, version: int) -> str:
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: an input of a "
        f"checkpointed region, [{tensor.type()} {list(tensor.shape)}], is at version {tensor._version}; expected "
        f"version {version} instead. The replay would start from the changed input.\n"
        "  works:    the operation out of place, such as x = x + 1 instead of x.add_(1)"
    )
