"""Rematerialization without torch: which operations of one step to run twice so that its memory fits a budget."""
from __future__ import annotations

__all__: list[str] = []
