"""Layouts: how results of operators lie in memory, where torch's fake tensors do not lie as real ones.

A trace leaves out a copy to the layout that a tensor has already, and takes a view in place of a copy where it can. If
that layout is another one when the trace runs, the view is an error, and random numbers come in another order.
"""
from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

__all__ = ["eager_layouts"]


@contextmanager
def eager_layouts() -> Iterator[None]:
    """Inside this context, what a traced BatchNorm returns on the CPU lies as what its kernel returns.

    That is contiguous or channels_last. By torch/_decomp/decompositions.py it lies as the input does, which may be
    transposed. Ends when these agree.
    """
    from torch._decomp import decomposition_table

    places = {operator: place for operator, place in _batch_norms().items() if operator in decomposition_table}
    known = {operator: decomposition_table[operator] for operator in places}
    laid_out = {operator: _laid_out(known[operator], place) for operator, place in places.items()}
    try:
        decomposition_table.update(laid_out)
        _forget(known)
        yield
    finally:
        decomposition_table.update(known)
        _forget(known)


def _batch_norms() -> dict[Any, int]:
    """The operators, with the place of the input among their arguments."""
    aten = torch.ops.aten
    forwards = (
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit_no_training.default,
    )
    return {**dict.fromkeys(forwards, 0), aten.native_batch_norm_backward.default: 1}


def _forget(operators: Container[Any]) -> None:
    """Drop what fake tensors remember of these."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for key in [key for key in list(FakeTensorMode.cache) if key.key[0] in operators]:
        FakeTensorMode.cache.pop(key, None)


def _laid_out(decomposition: Callable[..., Any], place: int) -> Callable[..., Any]:
    @wraps(decomposition)  # torch takes only one that has a name of its own
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        first, *others = decomposition(*args, **kwargs)
        if first is not None and first.device.type == "cpu":
            first = first.contiguous(memory_format=_format_of(args[place]))
        return (first, *others)

    return decomposed


def _format_of(tensor: Tensor) -> torch.memory_format:
    """What torch's C++ suggests for a result that is made of ``tensor``."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is not None and tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous():
        return last
    return torch._prims_common.suggest_memory_format(tensor)
