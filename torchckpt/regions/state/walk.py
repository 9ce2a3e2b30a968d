"""Walk: what functions and classes reach, by what they hold and what their code names."""
from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import getattr_static
from itertools import chain
from logging import Filterer
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeAlias
from weakref import ReferenceType, WeakKeyDictionary

import torch
from torch import Tensor, nn

from torchckpt.modules import contents_of, is_module, names_in
from torchckpt.regions.state.host_random import as_generator, kinds_of_host

__all__ = ["Walk", "reach_of"]

Source: TypeAlias = Callable[[], object]
"""Gives a generator. It may be another in each call, or none: what a name stands for then."""

_MOST = 1000
"""The most objects that are looked at, and the most values of one container."""


class Walk:
    """The modules, functions and sources of generators that ``roots`` reach, functions as a rule, nearest first.

    An object refers to what the garbage collector finds in it, so no code of the user's runs. Globals, classes and
    Python modules hold too much: of these, what the functions found so far name counts.
    """

    def __init__(self, *roots: Any) -> None:
        self.functions: list[FunctionType] = []
        self.modules: list[nn.Module] = []
        self.sources: list[Source] = []
        self._names: dict[str, None] = {}
        self._spaces: list[tuple[Any, Mapping[str, Any]]] = []
        self._next: list[Any] = [*roots]
        seen: set[int] = set()
        self._kinds = (*kinds_of_host(), torch.Generator, BuiltinFunctionType, MethodType)
        for value in self._next:  # which grows meanwhile
            kind = type(value)
            if kind in _LEAVES or id(value) in seen:
                continue
            seen.add(id(value))
            if len(seen) > _MOST:
                break
            if issubclass(kind, nn.Module):
                if is_module(value):
                    self.modules.append(value)
            elif kind is FunctionType:
                self._function(value)
            elif issubclass(kind, (type, ModuleType)):
                is_class = issubclass(kind, type)
                self._enter(value, vars(value), "__module__" if is_class else "__name__")
                self._next.extend(value.__bases__ if is_class else ())
                if is_class and not issubclass(value, nn.Module):  # whose own reach is known by their classes
                    self._next.extend(map(vars(value).get, _CALLED))
            elif self._gives(value):
                self.sources.append(partial(_same, value))
            elif issubclass(kind, ReferenceType):
                self._next.append(value())
            elif kind is not BuiltinFunctionType and len(self._next) < 4 * _MOST:
                self._next.extend(_inside(value, kind))

    def _function(self, function: FunctionType) -> None:
        self.functions.append(function)
        self._next += [*contents_of(function), *function.__dict__.values()]
        known, names = function.__globals__, names_in(function.__code__)
        if names and not _is_of_others(known.get("__name__")):
            new = [name for name in names if name not in self._names]
            self._names.update(dict.fromkeys(new))
            self._look_up(new, self._spaces)
            # What the function imports itself.
            self._next += [sys.modules[name] for name in new if name in sys.modules and name not in known]
            if not any(known is space for _, space in self._spaces):
                self._enter(function, known, "__name__")

    def _enter(self, owner: Any, space: Mapping[str, Any], key: str) -> None:
        """Look up the names in ``space``, that of ``owner``, whose name is at ``key``; those found later, too."""
        name = space.get(key)
        if name == "numpy":  # which imports it when it is first asked for
            space = {"random": getattr(sys.modules.get("numpy"), "random", None)}
        if name in _DRAWING or not _is_of_others(name):
            self._spaces.append((owner, space))
            self._look_up(self._names, self._spaces[-1:])

    def _look_up(self, names: Iterable[str], spaces: Iterable[tuple[Any, Mapping[str, Any]]]) -> None:
        for owner, space in spaces:
            for name in names:
                if name in space:
                    value = space[name]
                    may_come = value is None and not isinstance(owner, type)  # classes have many a default of None
                    if may_come or self._gives(value):  # another may come there
                        self.sources.append(partial(_named, ReferenceType(owner), name))
                    else:
                        self._next.append(value)

    def _gives(self, value: Any) -> bool:
        """Whether ``value`` is a generator, or a method of one. Of most the class alone is asked, which is fast."""
        return issubclass(type(value), self._kinds) and as_generator(value) is not None


_NUMBERS = (type(None), bool, int, float, complex, str, bytes)
_LEAVES = frozenset({*_NUMBERS, CodeType, Tensor, nn.Parameter})
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_OTHERS = frozenset({*sys.stdlib_module_names, "torch", "torchckpt", "numpy"}) - {"__main__"}
_CALLED = "__call__", "forward"
"""What code calls of a class without its name: that of an object, and that of an autograd Function."""
_DRAWING = frozenset({"random", "numpy", "numpy.random"})
"""The modules of others that are looked into: their functions are methods of generators."""


def _same(value: object) -> object:
    return value


def _named(owner: ReferenceType[Any], name: str) -> object:
    of = owner()
    return (of.__globals__ if type(of) is FunctionType else getattr(of, "__dict__", {})).get(name)


def _is_of_others(module: object) -> bool:
    return type(module) is str and module.partition(".")[0] in _OTHERS


def _inside(value: Any, kind: type[Any]) -> Sequence[Any]:
    for container in _CONTAINERS:
        if issubclass(kind, container) and container.__len__(value) > _MOST:
            return ()
    # A logger knows all loggers. Frames refer to globals.
    if issubclass(kind, (Tensor, Filterer)) or (kind is dict and "__builtins__" in value):
        return ()
    return gc.get_referents(value)


class Reach(NamedTuple):
    """What the methods of a class reach."""

    sources: list[Source]
    names: frozenset[str]
    """All names in their code."""
    called: frozenset[str]
    """Those in the code that ``forward`` reaches, but for methods of classes that are no modules."""

    def may_set(self, has_tables: bool) -> bool:
        """Whether ``forward`` may set what modules hold: attributes, modes; or lists and dictionaries, if they have
        such."""
        return not (self.called.isdisjoint(_SETTERS) and (not has_tables or self.called.isdisjoint(_OF_TABLES)))


_of_classes: WeakKeyDictionary[type[nn.Module], Reach] = WeakKeyDictionary()
_SETTERS = frozenset({
    "__dict__", "__setattr__", "_buffers", "_modules", "_parameters", "delattr", "eval", "register_buffer",
    "register_forward_hook", "register_forward_pre_hook", "register_module", "register_parameter", "requires_grad_",
    "setattr", "train", "vars",
})
_OF_TABLES = frozenset({
    "__setitem__", "append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "update",
})


def _names_of(functions: Iterable[FunctionType]) -> frozenset[str]:
    return frozenset(chain.from_iterable(names_in(function.__code__) for function in functions))


def _is_of_other_class(function: FunctionType) -> bool:
    """Whether it is a method of a class of no modules, such as a cache: what it sets is its own."""
    owner = function.__globals__.get(function.__qualname__.partition(".")[0])
    return isinstance(owner, type) and not issubclass(owner, nn.Module)


def reach_of(cls: type[nn.Module]) -> Reach:
    """What the methods of ``cls`` reach, ``forward`` first: those of a large class reach too much."""
    reach = _of_classes.get(cls)
    if reach is None:
        own = chain.from_iterable(vars(base).values() for base in cls.__mro__ if not issubclass(nn.Module, base))
        walks = Walk(getattr_static(cls, "forward"), cls), Walk(*own)
        sources = [source for walk in walks for source in walk.sources]
        functions = [[f for f in walk.functions if f.__name__ != "train"] for walk in walks]  # by loops, not forwards
        called = _names_of(f for f in functions[0] if not _is_of_other_class(f))
        reach = _of_classes[cls] = Reach(sources, _names_of(chain.from_iterable(functions)), called)
    return reach
