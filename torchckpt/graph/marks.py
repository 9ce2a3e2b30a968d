"""Marks and regions: what the user says is to be kept, and what recomputed.

In eager all of them are the identity. While a call is traced they become notes on the nodes of its graph: a mark is an
alias, which has no storage of its own, and a region is a name on every node inside. What enters a region from outside
is kept; the rest of what is inside, and what leaves it, is recomputed when the backward needs it.
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

from torchckpt.errors import Fault, raise_faults
from torchckpt.graph.notes import alias, inside_region, is_tracing, marked

__all__ = ["Region", "mark", "region", "sequential"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def mark(value: T, name: str = "") -> T:
    """Keep ``value``: its tensors are the members of the 'collection'.

    The identity; in a trace of the graph level, an alias. Read what is returned: of a value that is read both marked
    and not, gradients are added up in another order than in eager, and their last bits may differ.

    >>> h = graph.mark(self.attention(x), "attn_out")

    Args:
        value: a tensor, or a nested structure of tensors; whatever is no tensor passes.
        name: what ``keep=["attn_out"]`` and ``plan.explain("attn_out")`` call it; marks may share a name. Default:
            nameless, a member of the collection all the same.
    """
    if not is_tracing():
        return value
    with marked(name):
        return pytree.tree_map_only(Tensor, lambda tensor: alias(tensor, name), value)  # type: ignore[no-any-return]


class Region:
    """A region by its name: a context, or a decorator. See :func:`region`."""

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
        """``function``, run in this region."""
        return _wrapped(function, self.name)


@overload
def region(what: str) -> Region: ...
@overload
def region(what: F) -> F: ...
def region(what: str | F) -> Region | F:
    """Recompute what is inside: nothing of it is kept but what enters it.

    The identity, but where a call is traced by the graph level. Regions nest: while an outer one is recomputed, an
    inner one keeps nothing but what enters it, so that what is ``d`` regions deep runs ``d + 1`` times (Griewank 1992;
    Relay's ``annotation.checkpoint``).

    >>> y = graph.region(self.block)(x)     # a function or module, called in a region
    >>> with graph.region("b3"):            # a part of a function
    ...     y = self.block(x)
    >>> @graph.region                       # every call of a function; also @graph.region("b3")
    ... def block(x): ...

    Args:
        what: a callable, or the region's name.

    Raises:
        ArgumentError: it is neither.
    """
    if isinstance(what, str):
        return inside_region(what) if torch.compiler.is_dynamo_compiling() else Region(what)  # type: ignore[return-value]
    if not callable(what):
        raise_faults("region()", [Fault("region() takes a callable or a name", repr(what), "graph.region(block)(x)")])
    return _wrapped(what, getattr(what, "__name__", type(what).__name__))


def sequential(functions: Sequence[Callable[[Any], Any]], segments: int, x: Any, last: bool = False) -> Any:
    """Call ``functions`` one after the other, in ``segments`` regions of about as many functions each.

    Args:
        functions: each takes what the one before returned; an ``nn.Sequential`` is such a sequence.
        segments: from 1 to the number of functions. About the square root of it needs the least memory (Chen 2016).
        x: what the first takes.
        last: whether the last segment is a region too. Its values are alive when the backward starts, so that to
            recompute them costs and gives little. Default: no.

    Raises:
        ArgumentError: there are no functions, or fewer than segments.
    """
    functions = list(functions)
    if not 1 <= segments <= len(functions):
        rule = "a sequence is cut into one segment at least, and at most one for each function"
        received = f"{segments} segments of {len(functions)} functions"
        raise_faults("sequential()", [Fault(rule, received, f"segments={max(1, round(len(functions) ** 0.5))}")])
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
