"""Annotations: marks, regions and names of modules, as users write them and as notes on the nodes of a traced graph.

In eager, marks and regions are the identity. While a call is traced, they become notes: a mark is an alias, which has
no storage of its own, and a region is a name on every node inside. The inputs of a region are kept. Its inner values
and its outputs are recomputed when the backward needs them.

Notes are in ``node.meta["custom"]``. :func:`torch.fx.traceback.annotate` puts them there, and AOTAutograd copies them
to the backward of each annotated operation. Dynamo records modules itself, in ``node.meta["nn_module_stack"]``.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from itertools import count, pairwise
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, fx, nn
from torch.fx.traceback import annotate
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from torchckpt.errors import Fault, brief, raise_fault
from torchckpt.regions.flags import local

__all__ = [
    "Region", "Tracing", "hide_marks", "is_tracing", "mark", "mark_of", "module_of", "named_modules", "region",
    "regions_of", "restore_marks", "sequential",
]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_MARK, _MODULE, _REGION = "torchckpt_mark", "torchckpt_module", "torchckpt_region:"

_HIDDEN = "torchckpt_hidden_marks"
_ALIAS = torch.ops.aten.alias.default

_DYNAMO = count()
"""Numbers for the regions that Dynamo traces."""

_ITEM = re.compile(r"\._modules\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]")


class Tracing:
    """The value of ``local.thread.tracing`` while a call is traced.

    It numbers the regions that the call enters, and remembers the original of each alias that a mark makes.
    """

    def __init__(self) -> None:
        self.regions = count()
        self._aliases: dict[int, tuple[Tensor, Tensor]] = {}

    def mark(self, tensor: Tensor, name: str) -> Tensor:
        """An alias of ``tensor``: its node carries the mark."""
        alias: Tensor = _ALIAS(tensor)
        self._aliases[id(alias)] = alias, tensor
        return alias

    def unmarked(self, value: object) -> object:
        """The original of ``value``, if it is an alias: a returned alias would count as a view of the original."""
        while id(value) in self._aliases:
            value = self._aliases[id(value)][1]
        return value

    def forget(self) -> None:
        """Drop the tensors of the trace."""
        self._aliases.clear()

    def __enter__(self) -> Tracing:
        self._before, local.thread.tracing = local.thread.tracing, self
        return self

    def __exit__(self, *raised: object) -> None:
        local.thread.tracing = self._before


def is_tracing() -> bool:
    """Whether calls of this thread are traced now, by the graph level or by Dynamo."""
    return torch.compiler.is_dynamo_compiling() or local.thread.tracing is not None


# what users write -----------------------------------------------------------------------------------------------------


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
        raise_fault(Fault("the name of the mark is not a string", brief(name), 'graph.mark(h, "h")'), "mark()")
    if not is_tracing():
        return value
    tracing = None if torch.compiler.is_dynamo_compiling() else local.thread.tracing
    with annotate({_MARK: name}):
        if isinstance(tracing, Tracing):
            return pytree.tree_map_only(Tensor, lambda tensor: tracing.mark(tensor, name), value)  # type: ignore[no-any-return]
        return pytree.tree_map_only(Tensor, _ALIAS, value)  # type: ignore[no-any-return]


class Region:
    """A named region of a traced step, as users write it: a context manager or a decorator. See :func:`region`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> Region:
        if is_tracing():  # one thread at a time does; others may enter this very region meanwhile
            self._entered.append(_inside_region(self.name))
            self._entered[-1].__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        if is_tracing():
            self._entered.pop().__exit__(*raised)

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
        return _inside_region(what) if torch.compiler.is_dynamo_compiling() else Region(what)  # type: ignore[return-value]
    if not callable(what):
        rule = "the argument is neither a callable nor a name"
        raise_fault(Fault(rule, brief(what), "graph.region(block)(x)"), "region()")
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
        raise_fault(Fault(rule, received, f"segments={max(1, round(len(functions) ** 0.5))}"), "sequential()")
    cuts = [len(functions) * segment // segments for segment in range(segments + 1)]
    for segment, (start, end) in enumerate(pairwise(cuts)):
        with region(f"segment {segment}") if last or segment < segments - 1 else nullcontext():
            for function in functions[start:end]:
                x = function(x)
    return x


def _wrapped(function: F, name: str) -> F:
    def inside(*args: Any, **kwargs: Any) -> Any:
        with region(name):
            return function(*args, **kwargs)

    return wraps(function)(inside) if hasattr(function, "__name__") else inside  # type: ignore[return-value]


def _inside_region(name: str) -> AbstractContextManager[None]:
    """Inside this context, each new node is noted as part of a new region, inside the regions already entered."""
    return annotate({f"{_REGION}{name}#{_number()}": True})


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # untyped in torch
def _number() -> str:
    """A number that no other region of this trace has; Dynamo calls this function while it traces."""
    tracing = local.thread.tracing
    return str(next(tracing.regions if isinstance(tracing, Tracing) else _DYNAMO))


# notes on nodes -------------------------------------------------------------------------------------------------------


def mark_of(node: fx.Node) -> str | None:
    return (node.meta.get("custom") or {}).get(_MARK)


def hide_marks(graph: fx.Graph) -> None:
    """Note each mark on the original of its alias, too: a compiler removes aliases from its graphs."""
    for node in graph.find_nodes(op="call_function", target=_ALIAS):
        name, source = mark_of(node), node.all_input_nodes[0]
        if name is not None:
            notes = source.meta.get("custom") or {}
            source.meta["custom"] = {**notes, _HIDDEN: (*notes.get(_HIDDEN, ()), name)}


def restore_marks(graph: fx.Graph) -> None:
    """Insert the aliases again for the marks that :func:`hide_marks` has noted."""
    for source in list(graph.nodes):
        for name in (source.meta.get("custom") or {}).get(_HIDDEN, ()):
            with graph.inserting_after(source):
                marked = graph.call_function(_ALIAS, (source,))
            marked.meta = {"val": source.meta["val"], "custom": {_MARK: name}}
            source.replace_all_uses_with(marked, lambda user, marked=marked: user is not marked)


def module_of(node: fx.Node) -> str:
    """The qualified name of the innermost module that made ``node``; empty for the root module."""
    notes = node.meta.get("custom") or {}
    if _MODULE in notes:
        return str(notes[_MODULE])
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return _qualified(stack[-1][0]) if stack else ""


def regions_of(node: fx.Node) -> tuple[str, ...]:
    """The regions that ``node`` is in, outermost first."""
    notes = node.meta.get("custom") or {}
    return tuple(key.removeprefix(_REGION) for key in notes if key.startswith(_REGION))


def _qualified(source: str) -> str:
    """``layers.3.mlp`` of Dynamo's ``L['self']._modules['layers']._modules['3'].mlp``."""
    name = re.sub(r"^L\['\w+'\]", "", source)
    return _ITEM.sub(lambda match: "." + next(filter(None, match.groups())), name).strip(".")


@contextmanager
def named_modules(root: nn.Module, at_end: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside this context, traced nodes get the qualified name of the module that runs them. No module is changed.

    ``at_end()`` is called at the end of the forward of ``root``, while its modules still hold the traced tensors.
    """
    names = {module: name for name, module in root.named_modules() if name}
    entered: list[AbstractContextManager[None]] = []
    tracing = local.thread.tracing

    def enter(module: nn.Module, arguments: Any) -> None:
        if torch.compiler.is_dynamo_compiling():  # a branch of torch.cond
            return
        if module in names and local.thread.tracing is tracing:
            entered.append(annotate({_MODULE: names[module]}))
            entered[-1].__enter__()

    def leave(module: nn.Module, arguments: Any, outputs: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        if module in names and local.thread.tracing is tracing:
            entered.pop().__exit__(None, None, None)
        elif module is root and local.thread.tracing is tracing:
            at_end()

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        while entered:  # by modules whose forward did not end: torch calls no hook of theirs where tracing fails
            entered.pop().__exit__(None, None, None)
