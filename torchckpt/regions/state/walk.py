"""Walk: what functions and classes reach, by what they hold and what their code names."""
from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from logging import Filterer
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary

from torch import Tensor, nn

from torchckpt.modules import contents_of, is_module, names_in
from torchckpt.regions.state.ambient import Generator
from torchckpt.regions.state.host_random import as_generator

__all__ = ["Walk", "reach_of"]

_MOST = 1000
"""The most objects that are looked at, and the most values of one container."""


class Walk:
    """The modules, functions and generators that ``roots`` reach, functions as a rule, nearest first.

    An object refers to what the garbage collector finds in it, so no code of the user's runs. Globals, classes and
    Python modules hold too much: of these, what the functions found so far name counts.
    """

    def __init__(self, *roots: Any) -> None:
        self.functions: list[FunctionType] = []
        self.modules: list[nn.Module] = []
        self.generators: list[Generator] = []
        self._names: dict[str, None] = {}
        self._spaces: list[Mapping[str, Any]] = []
        self._next: list[Any] = [*roots]
        seen: set[int] = set()
        for value in self._next:  # which grows meanwhile
            kind = type(value)
            if kind is BuiltinFunctionType and as_generator(value.__self__) is not None:
                value, kind = value.__self__, type(value.__self__)
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
                self._enter(vars(value), "__module__" if is_class else "__name__")
                self._next.extend(value.__bases__ if is_class else ())
            elif (generator := as_generator(value)) is not None:
                self.generators.append(generator)
            elif issubclass(kind, ReferenceType):
                self._next.append(value())
            elif len(self._next) < 4 * _MOST:
                self._next.extend(_inside(value, kind))

    def _function(self, function: FunctionType) -> None:
        self.functions.append(function)
        self._next += [*contents_of(function), *function.__dict__.values()]
        known, names = function.__globals__, names_in(function.__code__)
        if names and not _is_of_others(known.get("__name__")):
            new = [name for name in names if name not in self._names]
            self._names.update(dict.fromkeys(new))
            self._look_up(new, self._spaces)
            if not any(known is space for space in self._spaces):
                self._enter(known, "__name__")

    def _enter(self, space: Mapping[str, Any], owner: str) -> None:
        """Look up the names in ``space``, which tells its owner by the key ``owner``; those found later, too."""
        name = space.get(owner)
        if name == "numpy":
            space = {"random": sys.modules["numpy"].random}  # NumPy imports it when it is first asked for
        if name in _DRAWING or not _is_of_others(name):
            self._spaces.append(space)
            self._look_up(self._names, [space])

    def _look_up(self, names: Iterable[str], spaces: Iterable[Mapping[str, Any]]) -> None:
        self._next.extend(space[name] for space in spaces for name in names if name in space)


_NUMBERS = (type(None), bool, int, float, complex, str, bytes)
_LEAVES = frozenset({*_NUMBERS, CodeType, BuiltinFunctionType, Tensor, nn.Parameter})
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_OTHERS = frozenset({*sys.stdlib_module_names, "torch", "torchckpt", "numpy"}) - {"__main__"}
_DRAWING = frozenset({"random", "numpy", "numpy.random"})
"""The modules of others that are looked into: their functions are methods of generators."""


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

    generators: list[Generator]
    names: frozenset[str]
    """All names in their code."""


_of_classes: WeakKeyDictionary[type[nn.Module], Reach] = WeakKeyDictionary()


def reach_of(cls: type[nn.Module]) -> Reach:
    """What the methods of ``cls`` reach, ``forward`` first: those of a large class reach too much."""
    reach = _of_classes.get(cls)
    if reach is None:
        own = [dict(vars(base)) for base in cls.__mro__ if not issubclass(nn.Module, base)]
        walks = Walk(cls.forward, cls), Walk(*chain.from_iterable(map(dict.values, own)))
        generators = dict.fromkeys(chain.from_iterable(walk.generators for walk in walks))
        functions = chain.from_iterable(walk.functions for walk in walks)
        names = chain.from_iterable(names_in(function.__code__) for function in functions)
        reach = _of_classes[cls] = Reach([*generators], frozenset(names))
    return reach
