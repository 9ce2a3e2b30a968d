"""Layouts: how results of operators lie in memory, where torch's fake tensors do not lie as real ones.

A trace leaves out a copy to the layout that a tensor has already, and takes a view in place of a copy where it can. If
that layout is another one when the trace runs, the view is an error, and random numbers come in another order.
"""
from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

__all__ = ["as_it_lay", "eager_layouts"]


@contextmanager
def eager_layouts() -> Iterator[None]:
    """Inside this context, what some traced operators return on the CPU lies as what their kernels return.

    That of a BatchNorm is contiguous or channels_last. By torch/_decomp/decompositions.py it lies as the input does,
    which may be transposed. Gradients of losses are contiguous, and others lie as the first of the tensors that are
    read. A kernel that takes its input for contiguous, as the backward of a GroupNorm, would read other numbers. Ends
    when these agree.
    """
    from torch._decomp import decomposition_table

    layouts = {operator: lay for operator, lay in _layouts().items() if operator in decomposition_table}
    known = {operator: decomposition_table[operator] for operator in layouts}
    laid_out = {operator: _laid_out(known[operator], lay) for operator, lay in layouts.items()}
    try:
        decomposition_table.update(laid_out)
        _forget(known)
        yield
    finally:
        decomposition_table.update(known)
        _forget(known)


def as_it_lay(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator of a traced forward. A tensor that it changes in place lies afterwards as before, as in eager.

    AOTAutograd puts what the operator out of place returns in that tensor's place, which may lie in another way:
    ``masked_fill`` makes what is transposed contiguous. It is tried on a copy, left out of the graph if unread.
    Ends when torch/_subclasses/functional_tensor.py keeps strides.
    """
    tensor = args[0] if args else None
    if isinstance(tensor, Tensor) and _is_in_place(operator) and _is_transposed(tensor):
        changed = torch.ops.aten.clone.default(tensor)
        operator(changed, *args[1:], **kwargs)
        if _strides_of(changed) != tensor.stride():
            return torch.ops.aten.copy_.default(tensor, changed)
    return operator(*args, **kwargs)


def _strides_of(tensor: Any) -> tuple[int, ...]:
    """Those of the value: the strides of what AOTAutograd traces with are those that it would have in eager."""
    if hasattr(tensor, "elem"):
        torch_: Any = torch
        torch_._sync(tensor)
        tensor = torch_._from_functional_tensor(tensor.elem)
    return tuple(tensor.stride())


def _is_in_place(operator: Any) -> bool:
    """Whether an operator changes the values of its first argument alone, and draws nothing."""
    not_meant = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}  # unsqueeze_() changes how a tensor lies
    if not isinstance(operator, OpOverload) or not_meant.intersection(operator.tags):
        return False
    first, *others = [argument.is_write for argument in operator._schema.arguments] or [False]
    return first and not any(others) and operator.namespace == "aten"


def _is_transposed(tensor: Tensor) -> bool:
    """Whether ``tensor`` lies without gaps, but not in the order of its dimensions."""
    if tensor.layout != torch.strided or tensor.is_contiguous() or not tensor.numel():
        return False
    return tensor.numel() == 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))


_Lay: TypeAlias = Callable[[Tensor, Sequence[Any]], Tensor]
"""Takes what a traced operator returns, and its arguments; returns a tensor that lies as the kernel's result."""


def _layouts() -> dict[Any, _Lay]:
    """The operators that lie otherwise, with how they lie."""
    aten = torch.ops.aten
    norms = (
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit_no_training.default,
    )
    contiguous = (
        aten.mse_loss_backward.default,
        aten.smooth_l1_loss_backward.default,
        aten.huber_loss_backward.default,
        aten._log_softmax_backward_data.default,
        aten.native_layer_norm_backward.default,
        aten.log_sigmoid_forward.default,
    )
    elementwise = (
        aten.binary_cross_entropy.default,
        aten.elu_backward.default,
        aten.hardsigmoid_backward.default,
        aten.hardswish_backward.default,
        aten.hardtanh_backward.default,
        aten.native_dropout_backward.default,
        aten.softplus_backward.default,
    )
    return {
        **dict.fromkeys(norms, partial(_as_norm, 0)),
        aten.native_batch_norm_backward.default: partial(_as_norm, 1),
        **dict.fromkeys(contiguous, lambda result, args: result.contiguous()),
        **dict.fromkeys(elementwise, _as_first),
        aten.binary_cross_entropy_backward.default: lambda result, args: _as_first(result, args[1:]),
    }


def _as_norm(place: int, result: Tensor, args: Sequence[Any]) -> Tensor:
    return result.contiguous(memory_format=_format_of(args[place]))


def _as_first(result: Tensor, args: Sequence[Any]) -> Tensor:
    """As the result of an elementwise kernel of ``args``, whose first tensor decides."""
    read = [argument for argument in args if isinstance(argument, Tensor) and argument.shape == result.shape]
    strides = torch._prims_common.compute_elementwise_output_strides(*read) if read else result.stride()
    return result.new_empty_strided(result.shape, strides)


def _forget(operators: Container[Any]) -> None:
    """Drop what fake tensors remember of these."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for key in [key for key in list(FakeTensorMode.cache) if key.key[0] in operators]:
        FakeTensorMode.cache.pop(key, None)


def _laid_out(decomposition: Callable[..., Any], lay: _Lay) -> Callable[..., Any]:
    @wraps(decomposition)  # torch takes only one that has a name of its own
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        results = decomposition(*args, **kwargs)
        first, *others = results if isinstance(results, tuple) else (results,)
        if first is not None and first.device.type == "cpu":
            first = lay(first, args)
        return (first, *others) if isinstance(results, tuple) else first

    return decomposed


def _format_of(tensor: Tensor) -> torch.memory_format:
    """What torch's C++ suggests for a result that is made of ``tensor``."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is not None and tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous():
        return last
    return torch._prims_common.suggest_memory_format(tensor)
