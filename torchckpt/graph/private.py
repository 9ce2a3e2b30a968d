"""Every name of torch's that is private or may change between its releases, and that the graph level uses, in one place.

AOTAutograd traces a call and its derivatives as one graph, the joint graph, and asks a function to part it in a forward
and a backward: that function is where this package comes in. Dynamo's backends go the same way.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from torchckpt.errors import CaptureError, Fault

__all__ = [
    "BATCH_NORM",
    "BATCH_NORM_AGAIN",
    "BATCH_NORM_BACKWARD",
    "Partition",
    "differentiable",
    "is_collective",
    "is_mutable",
    "is_random",
    "require_supported_torch",
]

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
"""``partition(joint, inputs, *, num_fwd_outputs, ...)``: the forward and the backward of a joint graph."""

_OLDEST = (2, 11)

BATCH_NORM: Any = torch.ops.aten._native_batch_norm_legit_functional.default
BATCH_NORM_AGAIN: Any = torch.ops.aten._native_batch_norm_legit.no_stats
BATCH_NORM_BACKWARD: Any = torch.ops.aten.native_batch_norm_backward.default
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")


def is_random(target: object) -> bool:
    """Whether an operator draws from a generator."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def is_collective(target: object) -> bool:
    return isinstance(target, OpOverload) and target.namespace in _COLLECTIVES


def is_mutable(target: object) -> bool:
    """Whether an operator writes to what it is given."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def require_supported_torch() -> None:
    """Raise a :class:`~torchckpt.errors.CaptureError` where this torch cannot be captured."""
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < _OLDEST:
        fault = Fault("the graph level needs torch 2.11 or newer", f"torch {torch.__version__}",
                      "pip install 'torch>=2.11'")
        raise CaptureError(str(fault))


def differentiable(function: Callable[..., Any], partition: Partition) -> Callable[..., Any]:
    """``function`` of tensors, traced at its first call; its joint graph is parted by ``partition`` and run as it is.

    The two graphs must take a list and clear it: what the list holds then dies after its last use.
    """
    from functorch.compile import aot_function

    return aot_function(function, fw_compiler=_boxed, bw_compiler=_boxed, partition_fn=partition)  # type: ignore[no-any-return]


def _boxed(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    def run(arguments: list[Any]) -> Any:
        return forward(arguments)

    forward = module.forward
    run._boxed_call = True  # type: ignore[attr-defined]
    return run
