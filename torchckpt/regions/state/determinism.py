"""Determinism: the errors for a replay that differs from its forward."""
from __future__ import annotations

import functools
from contextlib import suppress
from types import BuiltinMethodType, MethodType, NoneType

from torchckpt.errors import RecomputationError
from torchckpt.typing import Function

__all__ = ["compiled_anew", "differs", "keeps_differently", "name_of"]

_CAUSES = """\
Likely causes, each with its fix:
  - state that the function changes itself (a counter, a cache): change it under `if not torchckpt.is_recomputing():`
  - random numbers of a generator that is not replayed: name it, checkpoint(function, x, generators=(generator,))
  - a parameter, buffer or global that changed between forward and backward: change it after the backward
  - a context that held around the forward only (sdpa_kernel, a tensor mode): enter it inside, or by context_fn
  - a function that is free to choose: determinism_check="none", if every choice has the same gradients"""

_WRITTEN = """
  - a tensor from outside that the function itself writes (out=, clamp_): make it inside of the function, or a parameter
    or buffer of a module, checkpoint(module, x)"""


def differs(function: Function, place: int, total: int, forward: str, replay: str) -> RecomputationError:
    """The error for saved tensor ``place`` (from 0) of ``total``; ``forward`` and ``replay`` describe both tensors."""
    return RecomputationError(
        f"the replay of region {name_of(function)} did not save what its forward saved\n"
        f"  first to differ: saved tensor {place + 1} of {total}\n"
        f"  forward saved:   {forward}\n"
        f"  replay saved:    {replay}\n{_CAUSES}{_WRITTEN if 'inplace operation' in replay else ''}"
    )


def compiled_anew(function: Function) -> RecomputationError:
    """The error for a replay inside of which code was compiled, with nothing to compare what it saves with."""
    return RecomputationError(
        f"the replay of region {name_of(function)} compiled code that its forward found compiled: nothing tells "
        "whether the new graph saves what the old one did\n"
        "  received: a compilation inside of a replay, as after torch._dynamo.reset(), or where a guard fails there\n"
        '  works:    the step again, from its forward; or checkpoint(function, x, determinism_check="values")'
    )


def keeps_differently(function: Function, number: int, forward: str, replay: str) -> RecomputationError:
    """The error for call ``number`` (from 0) of ``keep``; ``forward`` and ``replay`` describe what each keeps."""
    return RecomputationError(
        f"the replay of region {name_of(function)} did not call torchckpt.keep as its forward did\n"
        f"  first to differ: call {number + 1} of keep\n"
        f"  forward kept:    {forward}\n"
        f"  replay keeps:    {replay}\n{_CAUSES}"
    )


def name_of(function: Function) -> str:
    """The name of a region in messages: the qualified name of its function, its method or its module's class."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, (MethodType, BuiltinMethodType)) and not isinstance(function.__self__, (type, NoneType)):
        return f"'{type(function.__self__).__qualname__}.{function.__name__}'"
    name: object = None
    with suppress(Exception):  # a proxy may raise, or answer, anything
        name = function.__qualname__
    return f"'{name if name and isinstance(name, str) else type(function).__qualname__}'"
