"""Compilations: Dynamo may compile in a replay what ran from its cache in the forward, and save other tensors then.

So the values of what is saved are compared if code was compiled inside of a replay. The forward has noted checksums of
them if there were compilations since a replay of its function last ran without one: in the first steps, that is.
"""
from __future__ import annotations

import sys
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torchckpt.modules import module_of, uncompiled
from torchckpt.regions.flags import thread
from torchckpt.regions.state.reached import runs_compiled_code
from torchckpt.typing import Function

__all__ = ["compilations", "is_settled", "settle"]


class _Counter:
    def __init__(self) -> None:
        self.total = 0
        """The compilations of this process since the first look, and 1 for those before; 0: Dynamo is not there."""

    def look(self) -> int:
        if not self.total and (dynamo := sys.modules.get("torch._dynamo.convert_frame")) is not None:
            register = getattr(dynamo, "register_bytecode_hook", None)
            if register is not None:
                self.total = 1
                register(self._compiled)
        return self.total

    def _compiled(self, _: CodeType, __: CodeType) -> None:
        self.total += 1
        if thread.flags[2] is not None:
            thread.flags[2].compiles = True


compilations = _Counter()
_settled: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def is_settled(function: Function) -> bool:
    """Whether nothing was compiled since ``settle``; true without Dynamo, and of a function that reaches no compiled
    code: reading checksums would make the host wait for the device."""
    total = compilations.total or compilations.look()
    return not total or _settled.get(_key(function)) == total or not runs_compiled_code(function)


def settle(function: Function) -> None:
    """A replay of ``function`` has ended, and nothing was compiled in it."""
    total = compilations.total or compilations.look()
    if total:
        _settled[_key(function)] = total


def _key(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    function = uncompiled(function)
    if (module := module_of(function)) is not None:
        return module
    if type(function) is MethodType:
        function = function.__func__
    return function.__code__ if type(function) is FunctionType else type(function)
