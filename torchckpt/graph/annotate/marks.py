"""Marks and regions: the user's annotations of values to keep, and of code to recompute.

In eager, all of them are the identity. While a call is traced, they become notes on the nodes of its graph: a mark is
an alias, which has no storage of its own, and a region is a name on every node inside. The inputs of a region are kept.
Its inner values and its outputs are recomputed when the backward needs them.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from itertools import pairwise
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchckpt.errors import Fault, brief, called, raise_fault
from torchckpt.graph.annotate.annotations import alias, inside_region, is_tracing, marked

__all__ = ["Region", "mark", "region", "sequential"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def mark(value: T, name: str = "") -> T:
    """Mark ``value``: its tensors are kept for the backward, by ``keep="collection"`` or by name.

    In eager this is the identity; while the graph level traces, it returns an alias. Use the returned value only: if
    both it and ``value`` are read, gradients are added in a different order than in eager, and their last bits may
    differ.

    >>> h = graph.mark(self.attention(x), "attn_out")

    Args:
        value: a tensor, or a nested structure of tensors; leaves that are not tensors are returned unchanged.
        name: the name in ``keep=["attn_out"]`` and ``plan.explain("attn_out")``; marks may share a name. Default: no
            name; ``keep="collection"`` still keeps the value.

    Raises:
        ArgumentError: ``name`` is not a string.
    """
    if not isinstance(name, str):
        with called("mark()"):
            raise_fault(Fault("the name of the mark is not a string", brief(name), 'graph.mark(h, "h")'))
    if not is_tracing():
        return value
    with marked(name):
        return pytree.tree_map_only(Tensor, lambda tensor: alias(tensor, name), value)  # type: ignore[no-any-return]


class Region:
    """A named region: a context manager or a decorator. See :func:`region`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._entered: list[AbstractContextManager[None] | None] = []

    def __enter__(self) -> Region:
        inside = inside_region(self.name) if is_tracing() else None
        self._entered.append(inside)
        if inside is not None:
            inside.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        inside = self._entered.pop()
        if inside is not None:
            inside.__exit__(*raised)

    def __call__(self, function: F) -> F:
        """Wrap ``function`` so that each call runs in this region."""
        return _wrapped(function, self.name)


@overload
def region(what: str) -> Region: ...
@overload
def region(what: F) -> F: ...
def region(what: str | F) -> Region | F:
    """Recompute the code inside in the backward: of a region, only its inputs are kept.

    Without a trace of the graph level, this is the identity. Regions nest: while an outer region is recomputed, an
    inner one again keeps only its inputs. So code in ``d`` nested regions runs ``d + 1`` times (Griewank 1992; Relay's
    ``annotation.checkpoint``).

    >>> y = graph.region(self.block)(x)     # a function or module, called in a region
    >>> with graph.region("b3"):            # a part of a function
    ...     y = self.block(x)
    >>> @graph.region                       # every call of a function; also @graph.region("b3")
    ... def block(x): ...

    Args:
        what: a callable, such as a function or a module; or a name for the region.

    Raises:
        ArgumentError: ``what`` is neither a callable nor a string.
    """
    if isinstance(what, str):
        return inside_region(what) if torch.compiler.is_dynamo_compiling() else Region(what)  # type: ignore[return-value]
    if not callable(what):
        with called("region()"):
            raise_fault(Fault("the argument is neither a callable nor a name", brief(what), "graph.region(block)(x)"))
    return _wrapped(what, getattr(what, "__name__", type(what).__name__))


def sequential(functions: Sequence[Callable[[Any], Any]], segments: int, x: Any, last: bool = False) -> Any:
    """Call ``functions`` one after the other, in ``segments`` regions of about as many functions each.

    Args:
        functions: each takes the result of the one before; an ``nn.Sequential`` is such a sequence.
        segments: from 1 to the number of functions. About the square root of it needs the least memory (Chen 2016).
        x: the input of the first function.
        last: whether the last segment is a region too. The backward starts with its values, so their recomputation
            saves little memory. Default: False.

    Raises:
        ArgumentError: there are no functions, fewer than one segment, or more segments than functions.
    """
    functions = list(functions)
    if not 1 <= segments <= len(functions):
        rule = "there is no segment" if segments < 1 else "there are more segments than functions"
        received = f"{segments} segments of {len(functions)} functions"
        with called("sequential()"):
            raise_fault(Fault(rule, received, f"segments={max(1, round(len(functions) ** 0.5))}"))
    cuts = [len(functions) * segment // segments for segment in range(segments + 1)]
    for segment, (start, end) in enumerate(pairwise(cuts)):
        if last or segment < segments - 1:
            with region(f"segment {segment}"):
                x = _chained(functions[start:end], x)
        else:
            x = _chained(functions[start:end], x)
    return x


def _chained(functions: Sequence[Callable[[Any], Any]], x: Any) -> Any:
    for function in functions:
        x = function(x)
    return x


def _wrapped(function: F, name: str) -> F:
    def inside(*args: Any, **kwargs: Any) -> Any:
        with region(name):
            return function(*args, **kwargs)

    return wraps(function)(inside) if hasattr(function, "__name__") else inside  # type: ignore[return-value]
