"""The graph level: one traced graph of a step, one schedule, and many ways to choose what is kept and what recomputed."""
from __future__ import annotations

__all__: list[str] = []
