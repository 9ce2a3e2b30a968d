"""Modules: what ``torch.nn`` and ``torch.compile`` make of each."""
from __future__ import annotations

import sys
from typing import Any

from torch import nn

__all__ = ["OF_EVERY_MODULE", "is_compiled", "is_compiled_class"]

OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
"""The attributes that each module has of torch's, besides its mode."""


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` has made it, or ``module.compile()`` was called."""
    return module._compiled_call_impl is not None or is_compiled_class(type(module))


def is_compiled_class(cls: type[Any]) -> bool:
    """Whether ``cls`` is that of what ``torch.compile(module)`` makes. Nothing is imported to find out."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and issubclass(cls, dynamo.OptimizedModule)
