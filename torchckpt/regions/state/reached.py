"""Reached: the modules and the compiled code that a function can call, which it holds or names, or comes to by either.

Dynamo may compile in a replay what ran from its cache in the forward, and save other tensors then. So the values of
what is saved are compared if code was compiled inside of a replay. So the first steps note checksums; later ones do
once code was compiled again.
"""
from __future__ import annotations

import sys
import weakref
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from torchckpt.modules import is_compiled_class, is_compiled_function, is_module, module_of, names_in, uncompiled
from torchckpt.regions.flags import local
from torchckpt.regions.private import norm_layer
from torchckpt.regions.state.ambient import Generator
from torchckpt.regions.state.host_random import generators_in
from torchckpt.regions.state.layout import NamesModules, known_of, values_of
from torchckpt.regions.state.walk import Walk
from torchckpt.typing import Function

__all__ = ["DYNAMO", "compilations", "is_settled", "reached_by", "reaches_nothing", "runs_compiled_code", "settle"]


def reached_by(function: Function) -> tuple[list[nn.Module], list[Generator]]:
    """The modules and generators that ``function`` reaches otherwise than as its own: as a method of one, by naming
    them, or by those that a partial gives it. None of the modules is inside of another."""
    inner: Any = function
    roots: list[Any] = []
    while isinstance(inner, partial):
        roots += [given for given in (*inner.args, *inner.keywords.values()) if not is_module(given)]
        inner = inner.func
    called = inner.__self__ if type(inner) is MethodType else inner
    if not (issubclass(type(called), (nn.Module, NamesModules)) or reaches_nothing(inner)):
        roots.append(inner)
    if not roots:
        return [], []
    walk = Walk(*roots)
    modules = walk.modules
    inside = {id(child) for module in modules for child in _tree_of(module).children} if len(modules) > 1 else ()
    outermost = [module for module in modules if id(module) not in inside]
    return outermost, generators_in(source() for source in walk.sources)


def runs_compiled_code(function: Function) -> bool:
    """Whether ``function`` reaches compiled code, or is a method of a norm layer, such as its bound forward."""
    if type(function) is MethodType and isinstance(function.__self__, norm_layer):
        return True
    if "torch._dynamo" not in sys.modules:
        return False
    if is_module(function):
        return _tree_of(function).is_compiled()
    walk = Walk(function)
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


# modules inside of modules --------------------------------------------------------------------------------------------


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
