"""Operation: FLOPs and moved bytes of one operator call, counted from its shapes."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from torchckpt.plan.private import is_view
from torchckpt.tensors import tensors_in

__all__ = ["Operation", "operation_of"]


class Operation(NamedTuple):
    flops: int
    moved_bytes: int
    dtype: str
    """The dtype that it computes with, such as ``"bfloat16"``."""


def operation_of(operator: Any, args: Any, kwargs: Any, outputs: Any) -> Operation:
    """The costs of one call. Torch's counter has the FLOPs of products and convolutions; other operators count none.
    Every tensor is read or written once; a view moves nothing."""
    name, read, written = operator.overloadpacket, tensors_in((args, kwargs)), tensors_in(outputs)
    moved_bytes = 0 if is_view(operator) or str(name) in _IDLE else sum(map(_bytes, written))
    if moved_bytes:
        moved_bytes += min(sum(map(_bytes, read)), 2 * moved_bytes if str(name) in _PICKS else _EVERYTHING)
    dtype = next((tensor.dtype for tensor in [*read, *written] if tensor.is_floating_point()), torch.float32)
    return Operation(_flops(name, args, kwargs, outputs), moved_bytes, str(dtype).removeprefix("torch."))


_EVERYTHING = 1 << 62
_IDLE = {f"aten.{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}
_PICKS = {f"aten.{name}" for name in ("embedding", "gather", "index", "index_select")}
"""Operators that read only as many bytes of a table as they return."""


def _flops(name: Any, args: Any, kwargs: Any, outputs: Any) -> int:
    if str(name) in _ATTENTION:
        return _ATTENTION[str(name)](args)
    count = flop_registry.get(name)
    return 0 if count is None else int(count(*args, **kwargs, out_val=outputs))


def _attention(args: Any) -> int:
    query, key, value = (tensor.shape for tensor in args[:3])
    count: Callable[..., int] = sdpa_flop_count
    return count(query, _with_heads(key, query), _with_heads(value, query))


def _attention_backward(args: Any) -> int:
    gradient, query, key, value = (tensor.shape for tensor in args[:4])
    count: Callable[..., int] = sdpa_backward_flop_count
    return count(gradient, query, _with_heads(key, query), _with_heads(value, query))


def _with_heads(shape: torch.Size, query: torch.Size) -> torch.Size:
    """The shape of keys or values with a head for each head of the queries. Torch before 2.13 cannot count fewer."""
    return torch.Size((shape[0], query[1], *shape[2:]))


_ATTENTION: dict[str, Callable[[Any], int]] = {
    f"aten._scaled_dot_product_{kernel}{direction}": count
    for direction, count in (("", _attention), ("_backward", _attention_backward))
    for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
}
"""FLOP counts of attention. Torch's registry lacks the kernel of the CPU before 2.15."""


def _bytes(tensor: Tensor) -> int:
    """The bytes that are moved. An expanded tensor counts as its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
