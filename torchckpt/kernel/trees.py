"""Trees: the tensors in arguments and outputs of any structure. One tensor stays one tensor."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["PutBack", "copy_attributes", "tensors_of"]

PutBack: TypeAlias = Callable[[Sequence[Tensor]], Any]


def tensors_of(tree: Any) -> tuple[tuple[Tensor, ...], PutBack]:
    """The tensors in ``tree``, each once, and what makes it again of as many others.

    Where one tensor stood, one tensor stands again, in all its places and with the attributes that were put on it.
    """
    leaves, spec = pytree.tree_flatten(tree)
    unique = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    numbers = {key: number for number, key in enumerate(unique)}
    places = [(place, numbers[id(leaf)]) for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    attributes = [(n, tensor.__dict__.copy()) for n, tensor in enumerate(unique.values()) if tensor.__dict__]

    def put_back(tensors: Sequence[Tensor]) -> Any:
        for number, own in attributes:
            tensors[number].__dict__.update(own)
        made = list(rest)
        for place, number in places:
            made[place] = tensors[number]
        return pytree.tree_unflatten(made, spec)

    return tuple(unique.values()), put_back


def copy_attributes(source: Tensor, target: Tensor) -> Tensor:
    """``target``, with the attributes that were put on ``source``."""
    if source is not target and source.__dict__:
        target.__dict__.update(source.__dict__)
    return target
