"""Layouts: how results of operators lie in memory, where torch's fake tensors do not lie as real ones.

A trace leaves out a copy to the layout that a tensor has already, and takes a view in place of a copy where it can. If
that layout is another one when the trace runs, the view is an error, and random numbers come in another order.
"""
from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from torchckpt.graph.private.runtime import operating

__all__ = ["eager_layouts"]


@contextmanager
def eager_layouts() -> Iterator[None]:
    """Inside this context, what some traced operators return on the CPU lies as what their kernels return.

    That of a BatchNorm is contiguous or channels_last. By torch/_decomp/decompositions.py it lies as the input does,
    which may be transposed. Others are in torch/_refs and torch/_meta_registrations.py. A kernel that takes its input
    for contiguous, as the backward of a GroupNorm, would read other numbers. Ends when these agree.

    A tensor that is changed in place, also by a formula of autograd, lies afterwards as before.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake, layouts = FakeTensorMode._dispatch_impl, _layouts()

    def laid_out(mode: Any, operator: Any, types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        results = fake(mode, operator, types, args, kwargs)
        layout = layouts.get(operator) or _layout_of_expanded(operator, args)
        if layout is None:
            return results
        with mode:
            return pytree.tree_map_only(Tensor, lambda t: layout(t, args) if t.device.type == "cpu" else t, results)

    try:
        with patch.object(FakeTensorMode, "_dispatch_impl", laid_out), operating(_as_it_lay):
            _forget(layouts)
            yield
    finally:
        _forget(layouts)


def _as_it_lay(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator of a trace. A tensor that it changes in place lies afterwards as before, as in eager.

    AOTAutograd puts what the operator out of place returns in that tensor's place, which may lie in another way:
    ``masked_fill`` makes what is transposed contiguous. It is tried on a copy, left out of the graph if unread.
    Ends when torch/_subclasses/functional_tensor.py keeps strides.
    """
    name = _changed_by(operator)
    tensor = kwargs.get(name) if name == "out" else args[0] if name and args else None
    if isinstance(tensor, Tensor) and _is_transposed(tensor):
        changed = torch.ops.aten.clone.default(tensor)
        if name == "out":
            operator(*args, **{**kwargs, name: changed})
        else:
            operator(changed, *args[1:], **kwargs)
        if changed.shape == tensor.shape and _strides_of(changed) != tensor.stride():
            return torch.ops.aten.copy_.default(tensor, changed)
    return operator(*args, **kwargs)


def _strides_of(tensor: Any) -> tuple[int, ...]:
    """Those of the value: the strides of what AOTAutograd traces with are those that it would have in eager."""
    if hasattr(tensor, "elem"):
        torch_: Any = torch
        torch_._sync(tensor)
        tensor = torch_._from_functional_tensor(tensor.elem)
    return tuple(tensor.stride())


@cache
def _changed_by(operator: Any) -> str:
    """The name of the first argument, or ``"out"``, if an operator changes the values of that alone, and draws nothing;
    else nothing."""
    not_meant = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}  # unsqueeze_() changes how a tensor lies
    if not isinstance(operator, OpOverload) or operator.namespace != "aten" or not_meant.intersection(operator.tags):
        return ""
    names = [argument.name for argument in operator._schema.arguments]
    written = [argument.name for argument in operator._schema.arguments if argument.is_write]
    return written[0] if written in (names[:1], ["out"]) else ""


def _is_transposed(tensor: Tensor) -> bool:
    """Whether ``tensor`` lies without gaps, but not in the order of its dimensions."""
    if tensor.layout != torch.strided or tensor.is_contiguous() or not tensor.numel():
        return False
    return tensor.numel() == 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))


_Layout: TypeAlias = Callable[[Tensor, Sequence[Any]], Tensor]
"""Takes what a traced operator returns, and its arguments; returns a tensor that lies as the kernel's result."""


def _layouts() -> dict[Any, _Layout]:
    """The operators that lie otherwise, with how they lie."""
    aten = torch.ops.aten
    norms = (
        aten.native_batch_norm.default, aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit_no_training.default,
    )
    as_first_argument = (
        aten.channel_shuffle.default, aten.max_unpool2d.default, aten.reflection_pad3d.default,
        aten.replication_pad3d.default,
    )
    as_second_argument = (
        aten.reflection_pad3d_backward.default, aten.replication_pad2d_backward.default,
        aten.replication_pad3d_backward.default,
    )
    contiguous = (
        aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default,
        aten._log_softmax_backward_data.default, aten.native_layer_norm_backward.default,
        aten.log_sigmoid_forward.default, aten.glu_backward.default, aten.pow.Scalar, aten.normal.Tensor_Tensor,
        aten.normal.Tensor_float, aten.normal.float_Tensor,
    )
    elementwise = (
        aten.elu_backward.default, aten.hardsigmoid_backward.default, aten.hardswish_backward.default,
        aten.hardtanh_backward.default, aten.native_dropout_backward.default,
        aten.softplus_backward.default, aten.logit_backward.default, aten.copysign.Tensor, aten.copysign.Scalar,
        aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default, aten.heaviside.default,
        aten.logaddexp.default, aten.logaddexp2.default, aten.logical_and.default, aten.logical_or.default,
        aten.logical_xor.default, aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.special_xlog1py.default,
        aten.mish_backward.default, aten.mse_loss.default, aten.smooth_l1_loss.default, aten.complex.default,
        aten.polar.default,
    )
    elementwise_of_first = (
        aten.binary_cross_entropy.default, aten.huber_loss.default, aten.log_sigmoid_backward.default,
    )
    elementwise_from_second = (aten.leaky_relu_backward.default, aten.rsub.Tensor, aten.threshold_backward.default)
    return {
        **dict.fromkeys(norms, lambda result, args: _normed(result, args[0])),
        aten.native_batch_norm_backward.default: lambda result, args: _normed(result, args[1]),
        **dict.fromkeys(as_first_argument, lambda result, args: _formatted(result, args[0])),
        **dict.fromkeys(as_second_argument, lambda result, args: _formatted(result, args[1])),
        **dict.fromkeys(contiguous, lambda result, args: result.contiguous()),
        **dict.fromkeys(elementwise, _elementwise),
        **dict.fromkeys(elementwise_of_first, lambda result, args: _elementwise(result, args[:1])),
        **dict.fromkeys(elementwise_from_second, lambda result, args: _elementwise(result, (args[1], args[0]))),
        aten.binary_cross_entropy_backward.default: lambda result, args: _elementwise(result, args[1:2]),
        aten.ldexp.Tensor: _ldexp,
        aten.angle.default: lambda result, args: result.contiguous() if args[0].is_complex() else result,
    }


def _layout_of_expanded(operator: Any, args: Sequence[Any]) -> _Layout | None:
    """How an elementwise operator of half precision lies that reads an expanded tensor. torch/_prims_common/wrappers.py
    converts that to float32 first, and takes the order of the copy for its own, as kernels do for other dtypes only."""
    tensors = [argument for argument in args if isinstance(argument, Tensor)]
    halves = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    is_half = len(tensors) > 1 and {tensor.dtype for tensor in halves} < {torch.float16, torch.bfloat16}
    if not is_half or torch.Tag.pointwise not in operator.tags or operator in _OTHERS:
        return None
    is_expanded = any(t.layout == torch.strided and 0 in t.stride() and t.numel() > 1 for t in halves)
    return _half if is_expanded else None


def _half(result: Tensor, args: Sequence[Any]) -> Tensor:
    """Of integers, and of booleans, a kernel makes a copy in half precision first."""
    read = [argument for argument in args if isinstance(argument, Tensor)]
    return _elementwise(result, [t if t.is_floating_point() else torch.empty_like(t) for t in read])


_OTHERS: Any = (torch.ops.aten.masked_fill.Scalar, torch.ops.aten.masked_fill.Tensor, torch.ops.aten.where.self)
"""Tagged as elementwise: the first two are contiguous, and the last one converts nothing."""


def _formatted(result: Tensor, like: Tensor) -> Tensor:
    """``result``, in the format that torch's C++ suggests for ``like``."""
    return result.contiguous(memory_format=torch._prims_common.suggest_memory_format(like))


def _normed(result: Tensor, data: Tensor) -> Tensor:
    """``result`` of a norm of ``data``, or of its backward; what has one dimension is left as it is."""
    if result.dim() != data.dim():
        return result
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(data.dim())
    if last is not None and data.is_contiguous(memory_format=last) and not data.is_contiguous():
        return result.contiguous(memory_format=last)
    return _formatted(result, data)


def _elementwise(result: Tensor, args: Sequence[Any]) -> Tensor:
    """As the result of an elementwise kernel of ``args``, whose first tensor decides."""
    read = [argument for argument in args if isinstance(argument, Tensor)]
    if not read or torch.broadcast_shapes(*(t.shape for t in read)) != result.shape:  # type: ignore[no-untyped-call]
        return result
    read = [tensor.expand(result.shape) for tensor in read]
    strides = torch._prims_common.compute_elementwise_output_strides(*read)
    return result.new_empty_strided(result.shape, strides)


def _ldexp(result: Tensor, args: Sequence[Any]) -> Tensor:
    """In single precision it is a product with a power, which is contiguous."""
    return _elementwise(result, (args[0], args[1].contiguous()) if args[1].dtype == torch.float32 else args)


def _forget(operators: Container[Any]) -> None:
    """Drop what fake tensors remember of these, and of what is elementwise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for key in list(FakeTensorMode.cache):
        if key.key[0] in operators or torch.Tag.pointwise in getattr(key.key[0], "tags", ()):
            FakeTensorMode.cache.pop(key, None)
