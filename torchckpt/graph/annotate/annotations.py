"""Annotations: write and read the marks, regions and modules that are noted on the nodes of a traced graph.

Notes are in ``node.meta["custom"]``. :func:`torch.fx.traceback.annotate` puts them there, and AOTAutograd copies them
to the backward of each annotated operation. Dynamo records modules itself, in ``node.meta["nn_module_stack"]``.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.traceback import annotate
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from torchckpt.regions.flags import thread

__all__ = [
    "Tracing", "alias", "hide_marks", "inside_module", "inside_region", "is_tracing", "mark_of", "marked", "module_of",
    "named_modules", "regions_of", "restore_marks",
]

_MARK, _MODULE, _REGION = "torchckpt_mark", "torchckpt_module", "torchckpt_region:"

_HIDDEN = "torchckpt_hidden_marks"
_ALIAS = torch.ops.aten.alias.default

_DYNAMO = count()
"""Numbers for the regions that Dynamo traces."""

_ITEM = re.compile(r"\._modules\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]")


class Tracing:
    """The value of ``thread.tracing`` while a call is traced.

    It numbers the regions that the call enters, and remembers the original of each alias that a mark makes.
    """

    def __init__(self) -> None:
        self.regions = count()
        self._aliases: dict[int, tuple[Tensor, Tensor]] = {}

    def mark(self, tensor: Tensor, name: str) -> Tensor:
        """An alias of ``tensor``: its node carries the mark."""
        alias: Tensor = torch.ops.aten.alias.default(tensor)
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
        self._before, thread.tracing = thread.tracing, self
        return self

    def __exit__(self, *raised: object) -> None:
        thread.tracing = self._before


def alias(tensor: Tensor, name: str) -> Tensor:
    """The alias that the mark ``name`` puts in place of ``tensor``."""
    tracing = None if torch.compiler.is_dynamo_compiling() else thread.tracing
    return tracing.mark(tensor, name) if isinstance(tracing, Tracing) else torch.ops.aten.alias.default(tensor)


def is_tracing() -> bool:
    """Whether calls of this thread are traced now, by the graph level or by Dynamo."""
    return torch.compiler.is_dynamo_compiling() or thread.tracing is not None


def marked(name: str) -> AbstractContextManager[None]:
    """Inside this context, each new node is noted as the mark ``name``."""
    return annotate({_MARK: name})


def inside_module(name: str) -> AbstractContextManager[None]:
    """Inside this context, each new node is noted as part of the module with the qualified name ``name``."""
    return annotate({_MODULE: name})


def inside_region(name: str) -> AbstractContextManager[None]:
    """Inside this context, each new node is noted as part of a new region, inside the regions already entered."""
    return annotate({f"{_REGION}{name}#{_number()}": True})


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # untyped in torch
def _number() -> str:
    """A number that no other region of this trace has; Dynamo calls this function while it traces."""
    tracing = thread.tracing
    return str(next(tracing.regions if isinstance(tracing, Tracing) else _DYNAMO))


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
                alias = graph.call_function(_ALIAS, (source,))
            alias.meta = {"val": source.meta["val"], "custom": {_MARK: name}}
            source.replace_all_uses_with(alias, lambda user, alias=alias: user is not alias)


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
    return _ITEM.sub(lambda found: "." + next(filter(None, found.groups())), name).strip(".")


@contextmanager
def named_modules(root: nn.Module, at_end: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside this context, traced nodes get the qualified name of the module that runs them. No module is changed.

    ``at_end()`` is called at the end of the forward of ``root``, while its modules still hold the traced tensors.
    """
    names = {module: name for name, module in root.named_modules() if name}
    entered: list[AbstractContextManager[None]] = []
    tracing = thread.tracing

    def enter(module: nn.Module, arguments: Any) -> None:
        if torch.compiler.is_dynamo_compiling():  # a branch of torch.cond
            return
        if module in names and thread.tracing is tracing:
            entered.append(inside_module(names[module]))
            entered[-1].__enter__()

    def leave(module: nn.Module, arguments: Any, outputs: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        if module in names and thread.tracing is tracing:
            entered.pop().__exit__(None, None, None)
        elif module is root and thread.tracing is tracing:
            at_end()

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        while entered:  # by modules whose forward did not end: torch calls no hook of theirs where tracing fails
            entered.pop().__exit__(None, None, None)
