"""Modules and functions: what ``torch.nn`` and ``torch.compile`` make of each, and their names in messages."""
from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dis import opmap
from itertools import chain
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, NoneType
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchckpt.errors import Fault

__all__ = [
    "OF_EVERY_MODULE", "contents_of", "faults_of_lazy", "imported", "is_compiled", "is_compiled_class",
    "is_compiled_function", "is_module", "is_of_torch", "module_of", "name_of", "names_in", "uncompiled",
]

OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
"""The attributes that each module has of torch's, besides its mode."""
_OF_TORCH = frozenset(("abc", "builtins", "torch", "torchckpt", "typing"))


def is_module(value: object) -> TypeGuard[nn.Module]:
    """Whether ``value`` is a module, or a proxy of one. A mock of one says that it is, but has no submodules."""
    try:
        return isinstance(value, nn.Module) and "_modules" in vars(value)
    except Exception:  # a proxy of a module outside of its context cannot even tell its class
        return False


def module_of(function: object) -> nn.Module | None:
    """The module that ``function`` is, or that it is a method of. A proxy is not asked for attributes: it may answer
    any."""
    called = function.__self__ if isinstance(function, MethodType) else function
    return called if is_module(called) else None


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` has made it, or ``module.compile()`` was called."""
    return module._compiled_call_impl is not None or is_compiled_class(type(module))


def is_compiled_class(cls: type[Any]) -> bool:
    """Whether ``cls`` is that of what ``torch.compile(module)`` makes."""
    return issubclass(cls, imported("torch._dynamo.eval_frame", "OptimizedModule"))


def imported(module: str, *names: str) -> tuple[Any, ...]:
    """Those classes of ``module`` that have these names; none, if nobody has imported it: then nothing is of them."""
    loaded = sys.modules.get(module)
    return tuple(getattr(loaded, name) for name in names if hasattr(loaded, name))


_ORIGINAL = "_torchdynamo_orig_callable"


def is_compiled_function(value: object) -> bool:
    """Whether ``torch.compile`` has made it of a function."""
    return type(value) is FunctionType and _ORIGINAL in value.__dict__


def uncompiled(function: Any) -> Any:
    """The function that ``torch.compile`` has made ``function`` of; anything else as it is."""
    return function.__dict__[_ORIGINAL] if is_compiled_function(function) else function


def contents_of(function: FunctionType) -> list[Any]:
    """What ``function`` holds in its closure and its defaults. None stands for a cell that is still empty."""
    contents: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:
            contents.append(None)
    return [*contents, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


_names: dict[int, tuple[weakref.ref[CodeType], tuple[str, ...]]] = {}
_STORES = {opmap[f"{does}_{what}"]: name for does in ("STORE", "DELETE")
           for what, name in (("ATTR", "setattr"), ("SUBSCR", "__setitem__"))}


def names_in(code: CodeType) -> tuple[str, ...]:
    """The names of globals and attributes in ``code``, and in the functions that are defined in it. Where it sets or
    deletes attributes, ``setattr`` is one; where items, ``__setitem__``."""
    known = _names.get(id(code))
    if known is None:
        key, forget = id(code), _names.pop
        inside = chain.from_iterable(names_in(const) for const in code.co_consts if isinstance(const, CodeType))
        sets = [_STORES[operation] for operation in _STORES.keys() & {*code.co_code[::2]}]
        names = tuple(dict.fromkeys([*code.co_names, *sets, *inside]))
        known = _names[key] = weakref.ref(code, lambda _: forget(key, None)), names
    return known[1]


def name_of(function: Any) -> str:
    """The name of a region in messages: the qualified name of its function, its method or its module's class."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, (MethodType, BuiltinMethodType)) and not isinstance(function.__self__, (type, NoneType)):
        is_call = getattr(function, "__func__", None) is nn.Module.__call__  # which has a private name
        return f"'{type(function.__self__).__qualname__}.{'forward' if is_call else function.__name__}'"
    name: object = None
    with suppress(Exception):  # a proxy may raise, or answer, anything
        name = function.__qualname__
    return f"'{name if name and isinstance(name, str) else type(function).__qualname__}'"


def faults_of_lazy(parameters: Iterable[tuple[str, Tensor]], works: str) -> Iterator[Fault]:
    """The fault that one of the named ``parameters`` has no shape before the first call, if one has none."""
    lazy = next((name for name, parameter in parameters if is_lazy(parameter)), None)
    if lazy is not None:
        yield Fault("a parameter has no shape yet", f"{lazy} has none yet", works)


def is_of_torch(module: nn.Module) -> bool:
    """Whether no code of others is in its class, which ``fully_shard`` and ``parametrize`` make of a user's class."""
    return all(cls.__module__.partition(".")[0] in _OF_TORCH for cls in type(module).__mro__)
