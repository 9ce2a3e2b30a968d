"""Numbers: a function that draws, in a file of its own."""
from __future__ import annotations

import random

__all__ = ["DRAW", "draw"]


def draw():
    return random.random()


class _Draws:
    def __call__(self):
        return random.random()


DRAW = _Draws()
