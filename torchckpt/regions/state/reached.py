"""Reached: the modules and the compiled code that a function can call, which it holds or names, or comes to by either.

Dynamo may compile in a replay what ran from its cache in the forward, and save other tensors then. So the values of
what is saved are compared if code was compiled inside of a replay. So the first steps note checksums; later ones do
once code was compiled again.
"""
from __future__ import annotations

import gc
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary

from torch import Tensor, nn

from torchckpt.modules import (
    contents_of,
    is_compiled_class,
    is_compiled_function,
    is_module,
    module_of,
    names_in,
    uncompiled,
)
from torchckpt.regions.flags import local
from torchckpt.regions.private import norm_layer
from torchckpt.regions.state.layout import NamesModules, known_of, values_of
from torchckpt.typing import Function

__all__ = ["DYNAMO", "compilations", "is_settled", "modules_reached", "reaches_nothing", "runs_compiled_code", "settle"]

_MOST = 1000
"""The most objects that are looked at, and the most values of one container."""


def modules_reached(function: Function) -> list[nn.Module]:
    """The modules that ``function`` reaches otherwise than as its own: as a method of one, by naming them, or by those
    that a partial gives it. None of them is inside of another."""
    inner: Any = function
    roots: list[Any] = []
    while isinstance(inner, partial):
        roots += [given for given in (*inner.args, *inner.keywords.values()) if not is_module(given)]
        inner = inner.func
    called = inner.__self__ if type(inner) is MethodType else inner
    if not (issubclass(type(called), (nn.Module, NamesModules)) or reaches_nothing(inner)):
        roots.append(inner)
    if not roots:
        return []
    modules = _Walk(*roots).modules
    inside = {id(child) for module in modules for child in _tree_of(module).children} if len(modules) > 1 else ()
    return [module for module in modules if id(module) not in inside]


def runs_compiled_code(function: Function) -> bool:
    """Whether ``function`` reaches compiled code, or is a method of a norm layer, such as its bound forward."""
    if type(function) is MethodType and isinstance(function.__self__, norm_layer):
        return True
    if "torch._dynamo" not in sys.modules:
        return False
    if is_module(function):
        return _tree_of(function).is_compiled()
    walk = _Walk(function)
    return any(map(is_compiled_function, walk.functions)) or any(_tree_of(m).is_compiled() for m in walk.modules)


def reaches_nothing(function: Function) -> bool:
    """Whether ``function`` surely reaches nothing but its arguments. That is true of many, and cheap to find out."""
    if type(function) is not FunctionType or function.__closure__ or function.__defaults__ or function.__kwdefaults__:
        return False
    return function.__globals__.keys().isdisjoint(names_in(function.__code__))


# compilations ---------------------------------------------------------------------------------------------------------


DYNAMO = "torch._dynamo.convert_frame"
"""The module of Dynamo that compiles. Regions do not import it: if it is not there, nothing was compiled."""


class _Counter:
    def __init__(self) -> None:
        self.total = 0
        """The compilations of this process since the first look, and 1 for those before; 0: Dynamo is not there."""

    def look(self) -> int:
        if not self.total and (dynamo := sys.modules.get(DYNAMO)) is not None:
            self.total = 1
            dynamo.register_bytecode_hook(self._compiled)
        return self.total

    def _compiled(self, _: CodeType, __: CodeType) -> None:
        self.total += 1
        if local.thread.flags[2] is not None:
            local.thread.flags[2].compiles = True


compilations = _Counter()
_settled: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def is_settled(function: Function) -> bool:
    """Whether nothing was compiled since ``settle``, or ``function`` reaches no compiled code.

    Checksums are then avoided: the host would wait for the device.
    """
    total = compilations.total or compilations.look()
    return not total or _settled.get(_key(function)) == total or not runs_compiled_code(function)


def settle(function: Function) -> None:
    """Note that a replay of ``function`` has ended, and nothing was compiled in it."""
    total = compilations.total or compilations.look()
    if total and _settled.get(key := _key(function)) != total:
        _settled[key] = total


def _key(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    function = uncompiled(function)
    if (module := module_of(function)) is not None:
        return module
    if type(function) is MethodType:
        function = function.__func__
    return function.__code__ if type(function) is FunctionType else type(function)


# what is reached ------------------------------------------------------------------------------------------------------


class _Walk:
    """The modules and functions that ``roots`` reach, functions as a rule, nearest first.

    An object refers to what the garbage collector finds in it, so no code of the user's runs. Globals, classes and
    Python modules hold too much: of these, what the functions found so far name counts.
    """

    def __init__(self, *roots: Any) -> None:
        self.functions: list[FunctionType] = []
        self.modules: list[nn.Module] = []
        self._names: dict[str, None] = {}
        self._spaces: list[Mapping[str, Any]] = []
        self._next: list[Any] = [*roots]
        seen: set[int] = set()
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
                self._enter(vars(value), "__module__" if is_class else "__name__")
                self._next.extend(value.__bases__ if is_class else ())
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
        if not _is_of_others(space.get(owner)):
            self._spaces.append(space)
            self._look_up(self._names, [space])

    def _look_up(self, names: Iterable[str], spaces: Iterable[Mapping[str, Any]]) -> None:
        self._next.extend(space[name] for space in spaces for name in names if name in space)


_NUMBERS = (type(None), bool, int, float, complex, str, bytes)
_LEAVES = frozenset({*_NUMBERS, CodeType, BuiltinFunctionType, Tensor, nn.Parameter})
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_OTHERS = frozenset({*sys.stdlib_module_names, "torch", "torchckpt", "numpy"}) - {"__main__"}


def _is_of_others(module: object) -> bool:
    return type(module) is str and module.partition(".")[0] in _OTHERS


def _inside(value: Any, kind: type[Any]) -> Sequence[Any]:
    for container in _CONTAINERS:
        if issubclass(kind, container) and container.__len__(value) > _MOST:
            return ()
    if issubclass(kind, Tensor) or (kind is dict and "__builtins__" in value):  # globals, by a frame
        return ()
    return gc.get_referents(value)


class _Tree:
    """The modules inside of one module, which is one of them."""

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self._own = module._modules
        # Those of scripted modules are no dictionaries, and do not change.
        self._inside = [table for inner in modules if isinstance(table := inner._modules, dict)]
        self.children = values_of(self._inside)
        self._modules = list(map(weakref.ref, modules))
        self._has_compiled_class = any(is_compiled_class(type(inner)) for inner in modules)

    def is_of(self, module: nn.Module) -> bool:
        """Whether ``module`` is the module of this tree, not a shallow copy, and has the same modules inside."""
        return self._own is module._modules and values_of(self._inside) == self.children

    def is_compiled(self) -> bool:
        """Whether one of the modules was compiled, or holds what was: ``module.compile()`` puts a function there."""
        if self._has_compiled_class:
            return True
        # Most modules hold no function, and map() finds that out fast. A model may have thousands.
        values = values_of(vars(module) for reference in self._modules if (module := reference()) is not None)
        return FunctionType in map(type, values) and any(map(is_compiled_function, values))


def _tree_of(module: nn.Module) -> _Tree:
    known = known_of(module)
    tree: _Tree | None = known.tree
    if tree is None or not tree.is_of(module):
        tree = known.tree = _Tree(module)
    return tree
