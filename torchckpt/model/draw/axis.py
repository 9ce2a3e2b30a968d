"""Axis: maps values to coordinates, with ticks at round values."""
from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Axis"]


@dataclass(frozen=True)
class Axis:
    """Maps values from 0 to ``extent`` to coordinates from ``start`` to ``end``. ``end < start`` reverses the axis."""

    extent: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = value / self.extent if self.extent > 0 else 0.0
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int, unit: float = 1.0) -> list[float]:
        """At most ``most + 1`` values: 0 and the multiples of 1, 2 or 5 times a power of ten units, up to the extent.

        >>> Axis(33.0, 0.0, 800.0).ticks(4)
        [0.0, 10.0, 20.0, 30.0]
        """
        if not self.extent > 0:
            return [0.0]
        step = _round_up(self.extent / unit / most)
        return [index * step * unit for index in range(math.floor(self.extent / unit / step * (1 + 1e-9)) + 1)]


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next((factor * power for factor in (1.0, 2.0, 5.0) if value <= factor * power * (1 + 1e-9)), 10.0 * power)
