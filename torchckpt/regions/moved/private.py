"""Private: the private names of torch's that tell of tensors which are spread over ranks."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["dtensor_like"]


def dtensor_like(tensor: Any) -> Callable[[Tensor], Tensor]:
    """What makes a DTensor of what this rank holds, laid out as ``tensor``. No public form: ``__tensor_unflatten__`` of
    torch 2.13 (torch/distributed/tensor/_api.py) refuses views that flatten a sharded dimension."""
    of, spec, requires_grad = type(tensor), tensor._spec, tensor.requires_grad
    return lambda local: of(local, spec, requires_grad=requires_grad)
