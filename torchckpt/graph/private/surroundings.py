"""Surroundings: what holds around a trace, so that a call does in it what it does in eager."""
from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from torchckpt.errors import CheckpointError

__all__ = [
    "as_in_eager",
    "backward_without_autocast",
    "cast_once_in",
    "casting_once",
    "compiling",
    "eager_kernels",
    "without_autocast",
]

T = TypeVar("T")


def as_in_eager(trace: Callable[[], T]) -> T:
    """``trace()``. Where that fails, once more with ``torch.compiler.is_compiling()``.

    Code that looks at the values of tensors in eager asks for it, and does without them. What fails in a function that
    ``torch.compile`` has made is traced with what it was made of.
    """
    with eager_kernels(), backward_without_autocast():
        try:
            return trace()
        except CheckpointError:
            raise
        except Exception as error:
            with compiling(), _uncompiled_functions() if _is_of_compiled_function(error) else nullcontext():
                return trace()


def casting_once(
    tensors: Sequence[Tensor], are_leaves: Sequence[bool], is_enabled: bool
) -> AbstractContextManager[None]:
    """Inside, autocast casts each of ``tensors`` that is a leaf once, as eager does, whose cache a trace turns off.

    So the gradients of all uses are added up in the dtype of the cast.

    Args:
        tensors: of the trace.
        are_leaves: whether those that they stand for are; a trace makes none of them one.
        is_enabled: whether the cache was, before the trace.
    """
    for tensor, is_leaf in zip(tensors, are_leaves):
        if is_leaf and type(tensor.grad_fn).__name__ == "Error":  # what stands for the history of a mirrored tensor
            tensor.detach_().requires_grad_()
    return _cast_cache(is_enabled)


def cast_once_in(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Have a trace of ``module`` on such inputs do the same, to its end."""
    places = [place for place, value in enumerate(inputs) if isinstance(value, Tensor)]
    are_leaves, is_enabled = [inputs[place].is_leaf for place in places], torch.is_autocast_cache_enabled()

    def enter(*tensors: Tensor) -> None:
        casting_once(tensors, are_leaves, is_enabled)
        torch.set_autocast_cache_enabled(is_enabled)  # a trace puts it back

    given = list(module.graph.find_nodes(op="placeholder"))
    if not places:
        return
    with module.graph.inserting_after(given[-1]):
        module.graph.call_function(enter, tuple(given[place] for place in places))
    module.recompile()


@contextmanager
def _cast_cache(is_enabled: bool) -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(is_enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def without_autocast() -> AbstractContextManager[Any]:
    """Operations of a trace run as they are inside: the casts are operations of it too."""
    return torch._C._DisableAutocast()


def backward_without_autocast() -> AbstractContextManager[Any]:
    """Trace a backward as it runs after the ``with`` of an autocast, with no casts but those of its forward's."""
    from torch._functorch import config

    return config.patch(backward_pass_autocast="off")  # type: ignore[no-any-return]


def _uncompiled_functions() -> AbstractContextManager[Any]:
    """Inside, a function that ``torch.compile`` has made runs as the function that it was made of."""
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def _is_of_compiled_function(error: Exception) -> bool:
    """Control flow of torch's compiles its branches itself, and works."""
    frames = traceback.extract_tb(error.__traceback__)
    is_control_flow = any("_higher_order_ops" in frame.filename for frame in frames)
    return not is_control_flow and any(frame.name == "compile_wrapper" for frame in frames)


@contextmanager
def compiling() -> Iterator[None]:
    """Let ``torch.compiler.is_compiling()`` be true: code that looks at values in eager alone asks for it."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def eager_kernels() -> Iterator[None]:
    """Trace the kernels that eager runs, where torch would take its own formulas in Python for them.

    Those are for compilers: dozens of operations for a bilinear upsampling, and other last bits.
    """
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    operators = [getattr(packet, name) for packet in _in_formulas() for name in packet.overloads()]
    before = [(operator, dict(operator.py_kernels)) for operator in operators]
    try:
        for operator in operators:
            for key in keys:
                operator.py_kernels.pop(key, None)
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, kernels in before:
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


def _in_formulas() -> list[Any]:
    import torch._decomp  # registers them

    sizes = [f"{kind}{size}d" for size in (1, 2, 3) for kind in ("upsample_nearest", "_upsample_nearest_exact")]
    sizes += ["upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"]
    sizes += ["_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"]
    others = ["lstm", "gru", "rnn_tanh", "rnn_relu", "softshrink", "hardshrink"]
    others += ["multi_margin_loss", "multilabel_margin_loss_forward"]
    return [getattr(torch.ops.aten, name) for name in (*sizes, *others) if hasattr(torch.ops.aten, name)]
