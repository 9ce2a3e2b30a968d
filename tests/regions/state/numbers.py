"""Numbers: a function that draws, in a file of its own."""
from __future__ import annotations

import random

__all__ = ["draw"]


def draw():
    return random.random()
