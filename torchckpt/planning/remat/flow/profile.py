"""Profile: the bytes of each position, with quick changes and maxima of ranges of positions."""
from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Profile"]


class Profile:
    """Square root decomposition: a change of a range takes O(sqrt(n)), as whole blocks change by one number each."""

    def __init__(self, values: Sequence[int]) -> None:
        self.values = list(values)
        self.block = max(1, math.isqrt(len(values)))
        starts = range(0, len(values), self.block)
        self.tops = [max(self.values[start:start + self.block]) for start in starts]
        """The maximum of each block."""
        self.offsets = [0] * len(starts)
        """For each block, the number to add to its :attr:`values`."""

    def at(self, position: int) -> int:
        return self.values[position] + self.offsets[position // self.block]

    def add(self, first: int, end: int, more: int) -> None:
        """Add ``more`` to the positions from ``first`` up to, not including, ``end``."""
        if first >= end:
            return
        left, right = first // self.block, (end - 1) // self.block
        if left == right:
            self._add_within(left, first, end, more)
            return
        self._add_within(left, first, (left + 1) * self.block, more)
        self._add_within(right, right * self.block, end, more)
        self.offsets[left + 1:right] = [offset + more for offset in self.offsets[left + 1:right]]
        self.tops[left + 1:right] = [top + more for top in self.tops[left + 1:right]]

    def _add_within(self, block: int, first: int, end: int, more: int) -> None:
        self.values[first:end] = [value + more for value in self.values[first:end]]
        start = block * self.block
        self.tops[block] = max(self.values[start:start + self.block]) + self.offsets[block]

    def most(self, first: int, end: int) -> int:
        """The maximum of the positions from ``first`` up to, not including, ``end``; 0 if there are none."""
        if first >= end:
            return 0
        left, right = first // self.block, (end - 1) // self.block
        if left == right:
            return max(self.values[first:end]) + self.offsets[left]
        edges = (
            max(self.values[first:(left + 1) * self.block]) + self.offsets[left],
            max(self.values[right * self.block:end]) + self.offsets[right],
        )
        return max(*edges, *self.tops[left + 1:right])

    def over(self, first: int, limit: int) -> int:
        """The first position from ``first`` on with more than ``limit``; the number of positions if there is none."""
        block = first // self.block
        while block < len(self.tops):
            if self.tops[block] > limit:
                least, end = limit - self.offsets[block], min(len(self.values), (block + 1) * self.block)
                for position in range(max(first, block * self.block), end):
                    if self.values[position] > least:
                        return position
            block += 1
        return len(self.values)
