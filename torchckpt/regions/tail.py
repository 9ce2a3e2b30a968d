"""Tail: whether a function only returns from here on, so that a replay need not be ended by an exception.

An exception that passes through C++ takes as long as ten tiny operations.
"""
from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType, FrameType, FunctionType, MethodType

from torch import Tensor

from torchckpt.regions.private import is_of_newest_node
from torchckpt.typing import Function

__all__ = ["ends_with"]


def ends_with(saved: Tensor, frame: FrameType, function: Function, by: CodeType) -> bool:
    """Whether ``frame``, whose operation made ``saved`` and now saves it, is that of ``function``, called by ``by``,
    and returns what it gets: no operation and no statement would follow."""
    called = function.__func__ if isinstance(function, MethodType) else function
    caller = frame.f_back
    return (
        isinstance(called, FunctionType)
        and frame.f_code is called.__code__
        and caller is not None
        and caller.f_code is by  # not a call of the function by itself
        and _returns_next(frame.f_code, frame.f_lasti)
        and is_of_newest_node(saved)  # not an input of an operation that has not run yet
    )


@lru_cache(maxsize=1024)
def _returns_next(code: CodeType, place: int) -> bool:
    """Whether the instruction of ``code`` after that at ``place`` returns its result."""
    return next((one.opname for one in dis.get_instructions(code) if one.offset > place), "") == "RETURN_VALUE"
