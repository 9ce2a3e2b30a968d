"""Determinism: the errors for a replay that differs from its forward."""
from __future__ import annotations

import functools

from torchckpt.errors import RecomputationError
from torchckpt.typing import Function

__all__ = ["differs", "keeps_differently", "name_of"]

_CAUSES = """\
Likely causes, each with its fix:
  - state that the function changes itself (a counter, a cache): change it under `if not torchckpt.is_recomputing():`
  - random numbers of a generator that is not replayed: name it, checkpoint(function, x, generators=(generator,))
  - a parameter, buffer or global that changed between forward and backward: change it after the backward
  - a context that held around the forward only (sdpa_kernel, a tensor mode): enter it inside, or by context_fn
  - a function that is free to choose: determinism_check="none", if every choice has the same gradients"""


def differs(function: Function, place: int, total: int, forward: str, replay: str) -> RecomputationError:
    """The error for saved tensor ``place`` (from 0) of ``total``; ``forward`` and ``replay`` describe both tensors."""
    return RecomputationError(
        f"the replay of region {name_of(function)} did not save what its forward saved\n"
        f"  first to differ: saved tensor {place + 1} of {total}\n"
        f"  forward saved:   {forward}\n"
        f"  replay saved:    {replay}\n{_CAUSES}"
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
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, type):
        return f"'{type(owner).__qualname__}.{function.__name__}'"
    return f"'{getattr(function, '__qualname__', None) or type(function).__qualname__}'"
