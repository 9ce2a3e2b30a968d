"""Modules: what ``torch.nn`` and ``torch.compile`` make of each."""
from __future__ import annotations

import sys
from types import FunctionType, MethodType
from typing import Any, TypeGuard

from torch import nn

__all__ = [
    "OF_EVERY_MODULE",
    "imported",
    "is_compiled",
    "is_compiled_class",
    "is_compiled_function",
    "is_module",
    "module_of",
    "uncompiled",
]

OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
"""The attributes that each module has of torch's, besides its mode."""


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
    """The classes of ``module`` by these names. None, if it is not imported yet: then nothing is of these classes."""
    loaded = sys.modules.get(module)
    return tuple(getattr(loaded, name) for name in names if hasattr(loaded, name))


_ORIGINAL = "_torchdynamo_orig_callable"


def is_compiled_function(value: object) -> bool:
    """Whether ``torch.compile`` has made it of a function."""
    return type(value) is FunctionType and _ORIGINAL in value.__dict__


def uncompiled(function: Any) -> Any:
    """The function that ``torch.compile`` has made ``function`` of; anything else as it is."""
    return function.__dict__[_ORIGINAL] if is_compiled_function(function) else function
