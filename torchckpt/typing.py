"""Typing: the type aliases that several parts of the package use."""
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias

__all__ = ["CheckpointMode", "ContextFunction", "DeterminismCheck", "Function"]

Function: TypeAlias = Callable[..., Any]
"""The function of a region: any callable. Its arguments may be any objects, pytrees of tensors included."""

ContextFunction: TypeAlias = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Makes two context managers: one around the forward, one around the replay (``torch.utils.checkpoint``'s protocol)."""

DeterminismCheck: TypeAlias = Literal["default", "values", "none"]
CheckpointMode: TypeAlias = Literal["except_last", "always", "never"]
