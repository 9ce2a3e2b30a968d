"""NumPy's numbers, as ``np``. Where there is no NumPy, Python's own stand in for them, so that the other cases run."""
from __future__ import annotations

from types import SimpleNamespace

__all__ = ["is_numpy", "np"]

try:
    import numpy as np
except ImportError:
    np = SimpleNamespace(float64=float, float32=float, int64=int, int32=int, uint8=int, bool_=bool)

is_numpy = not isinstance(np, SimpleNamespace)
