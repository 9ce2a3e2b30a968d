"""Surroundings: settings of torch during a trace, so that the traced call computes as in eager."""
from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, fx

from torchckpt.errors import CheckpointError, text_of
from torchckpt.graph.private.layouts import eager_layouts

__all__ = [
    "as_in_eager", "backward_without_autocast", "cast_once_in", "casting_once", "compiling", "eager_kernels",
    "without_autocast",
]

T = TypeVar("T")


def as_in_eager(trace: Callable[[], T]) -> T:
    """Call ``trace()``. If tracing itself fails, call it again while ``torch.compiler.is_compiling()`` is true.

    Code that reads values of tensors often checks ``is_compiling()``, and then does not read them. If the failure was
    in a function made by ``torch.compile``, the second trace uses the original function. An error of the function
    itself is raised as it is: a second trace could hide it.
    """
    with eager_kernels(), eager_layouts(), backward_without_autocast():
        try:
            return trace()
        except Exception as error:
            if not _is_of_tracing(error):
                raise
            is_compiled = _is_of_compiled_function(error)
            again = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
        with compiling(), again:
            return trace()


_TRACERS = ("torch._subclasses", "torch._dynamo", "torch._higher_order_ops", "torch.fx")
_NO_DATA = ("FakeTensor", "FunctionalTensor", "tensor subclass", "using FX to", "fake impl", "python storage", '"meta"')
"""Parts of torch's messages about tensors that have no data."""


def _is_of_tracing(error: BaseException | None) -> bool:
    """Whether ``error``, or one that it was raised for, comes from tracing, such as from an operator on traced tensors.

    An error of memory never does.
    """
    if error is None or isinstance(error, (CheckpointError, MemoryError, torch.OutOfMemoryError)):
        return False
    if type(error).__module__.startswith(_TRACERS) or any(part in text_of(error) for part in _NO_DATA):
        return True
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    if any("_subclasses" in file for file in files):
        return True
    return _is_of_tracing(error.__cause__ or error.__context__)


@contextmanager
def casting_once(tensors: Sequence[Tensor], are_leaves: Sequence[bool], is_enabled: bool) -> Iterator[None]:
    """Inside this context, autocast casts each leaf among ``tensors`` only once, as in eager.

    So the gradients of all uses of a leaf are added in the dtype of the cast. A trace disables the cache of casts, and
    makes no leaves (``disable_autocast_cache`` of torch/fx/experimental/proxy_tensor.py, ``DelayedError`` of
    torch/_subclasses/meta_utils.py). Ends when it does neither.

    Args:
        tensors: the tensors of the trace.
        are_leaves: for each tensor, whether the original one is a leaf. In a trace none is a leaf.
        is_enabled: whether the autocast cache was enabled before the trace.
    """
    _make_leaves(tensors, are_leaves)
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(is_enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _make_leaves(tensors: Sequence[Tensor], are_leaves: Sequence[bool]) -> None:
    for tensor, is_leaf in zip(tensors, are_leaves):
        if is_leaf and type(tensor.grad_fn).__name__ == "Error":  # the history of a fake copy
            tensor.detach_().requires_grad_()


def cast_once_in(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Apply :func:`casting_once` in traces of ``module`` on such inputs, until the trace ends."""
    places = [place for place, value in enumerate(inputs) if isinstance(value, Tensor)]
    are_leaves, is_enabled = [inputs[place].is_leaf for place in places], torch.is_autocast_cache_enabled()

    def enter(*tensors: Tensor) -> None:
        _make_leaves(tensors, are_leaves)
        torch.set_autocast_cache_enabled(is_enabled)  # the trace restores it at its end

    placeholders = list(module.graph.find_nodes(op="placeholder"))
    if not places:
        return
    with module.graph.inserting_after(placeholders[-1]):
        module.graph.call_function(enter, tuple(placeholders[place] for place in places))
    module.recompile()


def without_autocast() -> AbstractContextManager[Any]:
    """Inside this context, autocast is off. A traced graph is run in it, for its casts are operations of the graph. The
    public ``torch.autocast(enabled=False)`` is for one kind of device."""
    return torch._C._DisableAutocast()


def backward_without_autocast() -> AbstractContextManager[Any]:
    """Inside this context, a backward is traced without autocast. Only the casts of the forward count."""
    from torch._functorch import config

    return config.patch(backward_pass_autocast="off")  # type: ignore[no-any-return]


def _is_of_compiled_function(error: Exception) -> bool:
    """Whether ``error`` comes from a function made by ``torch.compile``; torch's own control flow does not count."""
    frames = traceback.extract_tb(error.__traceback__)
    is_control_flow = any("_higher_order_ops" in frame.filename for frame in frames)
    return not is_control_flow and any(frame.name == "compile_wrapper" for frame in frames)


def compiling() -> AbstractContextManager[Any]:
    """Inside this context, ``torch.compiler.is_compiling()`` is true: code that checks it then reads no values.

    No public form: torch/compiler/__init__.py has the flag, which ``torch.export`` sets.
    """
    return patch.object(torch.compiler, "_is_compiling_flag", True)


@contextmanager
def eager_kernels() -> Iterator[None]:
    """Inside this context, a trace records the kernels that eager runs, instead of torch's Python decompositions.

    Decompositions are for compilers: a bilinear upsampling becomes dozens of operations, and rounds differently.
    torch/_decomp/decompositions.py registers them where no table of decompositions can leave them out. Ends when one
    can.
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
