"""The shared types."""
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias

__all__ = ["CheckpointMode", "ContextFunction", "DeterminismCheck", "Function"]

Function: TypeAlias = Callable[..., Any]
"""What a region runs: any callable on any arguments, pytrees among them."""

ContextFunction: TypeAlias = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Makes two context managers: one around the forward, one around the replay (``torch.utils.checkpoint``'s protocol)."""

DeterminismCheck: TypeAlias = Literal["default", "values", "none"]
CheckpointMode: TypeAlias = Literal["except_last", "always", "never"]
