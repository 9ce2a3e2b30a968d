"""Tensors: those in arguments and outputs of any structure."""
from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["tensors_in"]


def tensors_in(tree: Any) -> list[Tensor]:
    """In the order of the leaves; a tensor that stands in two places comes twice."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
