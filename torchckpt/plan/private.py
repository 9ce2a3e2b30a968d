"""Private: every private name of torch that ``torchckpt.plan`` uses, in one place."""
from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode  # what sees every operator; no public form

__all__ = [
    "VALUES_ASKED",
    "TorchDispatchMode",
    "fused_attention",
    "is_unallocated",
    "is_view",
    "sequence_now",
    "sequence_of",
    "unallocated",
]

VALUES_ASKED = (DataDependentOutputException, DynamicOutputShapeException)
"""What a tensor without memory raises where its values, or a shape that they decide, are asked for."""


def unallocated() -> AbstractContextManager[Any]:
    """Within, tensors have a device and a shape, and no memory: what torch.compile traces with. No public form.

    The ``meta`` device would do without, but there operators choose other kernels than on a real device: attention
    saves other bytes.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # It remembers each tensor that is made, by a weak reference, and uses that only for tensors that come from outside.
    # A module that is converted (bfloat16(), to()) swaps its parameters, which torch refuses where there is one.
    mode.fake_tensor_converter.set_tensor_memo = _forget  # type: ignore[method-assign,assignment]
    return mode


def _forget(*_: Any) -> None: ...


def is_unallocated(tensor: Tensor) -> bool:
    """Whether it was made where tensors have no memory, and on a device that has kernels."""
    return isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"


def sequence_now() -> int:
    """The number that the next autograd node of this thread gets. No public form."""
    with torch.enable_grad():
        probe = torch.empty((), requires_grad=True).view(1)
    return sequence_of(probe.grad_fn) + 1 if probe.grad_fn is not None else 0


def sequence_of(node: Node) -> int:
    """The number of an autograd node: nodes that were made later have larger ones. No public form."""
    return int(node._sequence_nr())


def is_view(operator: Any) -> bool:
    """Whether an operator returns a view of its argument, and moves nothing."""
    returns = operator._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    """``scaled_dot_product_attention`` by the kernel of an accelerator: FlashAttention where it can be, otherwise the
    memory-efficient one. Their operators have no public form."""
    operators = torch.ops.aten
    if mask is None and query.dtype in (torch.float16, torch.bfloat16):
        found = operators._scaled_dot_product_flash_attention(query, key, value, dropout, causal, scale=scale)
    else:
        found = operators._scaled_dot_product_efficient_attention(
            query, key, value, mask, True, dropout, causal, scale=scale
        )
    return found[0]  # type: ignore[no-any-return]  # untyped in torch
