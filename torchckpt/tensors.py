"""Tensors: those in arguments and outputs, the autograd nodes behind them, and the FLOPs of a call with them."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

__all__ = ["flop_formula", "nodes_behind", "tensors_in"]


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of ``tree``, in the order of its leaves; one that stands in two places comes twice."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def nodes_behind(outputs: Iterable[Tensor]) -> Iterator[Node]:
    """The autograd nodes that ``outputs`` depend on, each once, in the order in which a walk of their graph meets
    them."""
    stack, seen = [output.grad_fn for output in outputs], set[Node]()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack.extend(parent for parent, _ in node.next_functions)


def flop_formula(operator: Any) -> Callable[..., int] | None:
    """The function that counts the FLOPs of a call of ``operator``, by its arguments and its result, ``out_val``.

    None for an operator without FLOPs: all but products of matrices, convolutions and attention.
    """
    from torch.utils.flop_counter import flop_registry  # nothing else needs it

    name = str(operator)
    if name.removesuffix("_backward") in _ATTENTION:
        return _attention_backward_flops if name.endswith("_backward") else _attention_flops
    return flop_registry.get(operator)


_ATTENTION = frozenset(
    f"aten._scaled_dot_product_{kernel}"
    for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
)
"""Kernels of attention. Torch's registry lacks the one of the CPU before 2.15, and fewer heads of keys before 2.13."""


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    from torch.utils.flop_counter import sdpa_flop_count

    count: Callable[..., int] = sdpa_flop_count
    return count(query.shape, _with_heads(key, query), _with_heads(value, query))


def _attention_backward_flops(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    from torch.utils.flop_counter import sdpa_backward_flop_count

    count: Callable[..., int] = sdpa_backward_flop_count
    return count(gradient.shape, query.shape, _with_heads(key, query), _with_heads(value, query))


def _with_heads(tensor: Tensor, query: Tensor) -> torch.Size:
    """The shape of keys or values with a head for each head of the queries."""
    return torch.Size((tensor.shape[0], query.shape[1], *tensor.shape[2:]))
