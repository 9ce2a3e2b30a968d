"""Slow: cases that ``make slow`` alone runs."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["slow"]


def slow(values: Iterable[Any]) -> list[Any]:
    """Parameters with the mark, one for each of ``values``."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
