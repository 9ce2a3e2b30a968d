"""Private: every private name of torch that ``torchckpt.costs`` imports, in one place.

    mesh              a mesh whose other ranks are not there: what torch lacks for it
"""
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
from torch.utils._python_dispatch import TorchDispatchMode  # what sees every operator; no public form

from torchckpt.modules import imported
from torchckpt.tensors import inner_tensors

__all__ = [
    "VALUES_ASKED", "TorchDispatchMode", "fused_attention", "is_unallocated", "is_view", "sharded_kind",
    "unallocated",
]

VALUES_ASKED = (DataDependentOutputException, DynamicOutputShapeException)
"""The errors of a tensor without memory if code reads its values, or needs a shape that depends on them."""


_SHARDED = (
    ("torch.distributed.tensor", "DTensor", "DTensor, as of tensor parallelism or FSDP2's fully_shard()"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "FullyShardedDataParallel"),
)


def unallocated() -> AbstractContextManager[Any]:
    """Inside this context, new tensors have a device and a shape, but no memory. ``torch.compile`` uses the same mode,
    which has no public form.

    The ``meta`` device is public, but operators choose other kernels there: attention saves other bytes.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # The mode keeps a weak reference to each new tensor, by set_tensor_memo of torch/_subclasses/fake_tensor.py, and
    # needs it only for tensors from outside. swap_tensors of torch/utils/__init__.py refuses tensors with weak
    # references (pytorch/pytorch#178584), and a module that is converted (bfloat16(), to()) swaps its parameters. Ends
    # when it does not refuse.
    mode.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]
    return mode


def is_unallocated(tensor: Tensor) -> bool:
    """Whether ``tensor`` has no memory and is on the CPU, where operators choose the kernels of a real device."""
    return tensor.device.type == "cpu" and all(isinstance(inner, FakeTensor) for inner in inner_tensors(tensor))


def sharded_kind(value: object) -> str | None:
    """How a tensor or a module is sharded, in words; None if it is not."""
    return next((kind for module, name, kind in _SHARDED if isinstance(value, imported(module, name))), None)


def is_view(operator: Any) -> bool:
    """Whether an operator returns a view of its argument, and moves nothing."""
    returns = operator._schema.returns
    return bool(returns) and all(value.alias_info is not None and not value.alias_info.is_write for value in returns)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    """``scaled_dot_product_attention`` by the kernel of an accelerator: FlashAttention where it can be, otherwise the
    memory-efficient one. Their operators have no public form."""
    operators = torch.ops.aten
    if mask is None and query.dtype in (torch.float16, torch.bfloat16):
        outputs = operators._scaled_dot_product_flash_attention(query, key, value, dropout, causal, scale=scale)
    else:
        outputs = operators._scaled_dot_product_efficient_attention(
            query, key, value, mask, True, dropout, causal, scale=scale
        )
    return outputs[0]  # type: ignore[no-any-return]  # untyped in torch
