"""Profile: the bytes of each position, with quick changes and maxima of ranges of positions."""
from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Sequence

from torchckpt.planning.remat.flow.dataflow import Tables

__all__ = ["BlockProfile", "PositionMemory", "Profile", "profile"]

_PLAIN = 2000
"""The number of positions from which on blocks are faster."""


def profile(values: Sequence[int]) -> Profile:
    """A profile of these values, in blocks if there are many."""
    return Profile(values) if len(values) < _PLAIN else BlockProfile(values)


class Profile:
    """A plain list, the fastest for up to some thousand positions."""

    def __init__(self, values: Sequence[int]) -> None:
        self.values = list(values)

    def at(self, position: int) -> int:
        return self.values[position]

    def add(self, first: int, end: int, more: int) -> None:
        """Add ``more`` to the positions from ``first`` up to, not including, ``end``."""
        self.values[first:end] = [value + more for value in self.values[first:end]]

    def most(self, first: int, end: int) -> int:
        """The maximum of the positions from ``first`` up to, not including, ``end``; 0 if there are none."""
        return max(self.values[first:end], default=0)

    def over(self, first: int, limit: int) -> int:
        """The first position from ``first`` on with more than ``limit``; the number of positions if there is none."""
        values = self.values
        return next((position for position in range(first, len(values)) if values[position] > limit), len(values))


class BlockProfile(Profile):
    """Square root decomposition: a change of a range takes O(sqrt(n)), as whole blocks change by one number each."""

    def __init__(self, values: Sequence[int]) -> None:
        super().__init__(values)
        self.block = max(1, math.isqrt(len(values)))
        starts = range(0, len(values), self.block)
        self.tops = [max(self.values[start:start + self.block]) for start in starts]
        """The maximum of each block."""
        self.offsets = [0] * len(starts)
        """For each block, the number to add to its :attr:`values`."""

    def at(self, position: int) -> int:
        return self.values[position] + self.offsets[position // self.block]

    def add(self, first: int, end: int, more: int) -> None:
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
        super().add(first, end, more)
        start = block * self.block
        self.tops[block] = max(self.values[start:start + self.block]) + self.offsets[block]

    def most(self, first: int, end: int) -> int:
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
        block = first // self.block
        while block < len(self.tops):
            if self.tops[block] > limit:
                least, end = limit - self.offsets[block], min(len(self.values), (block + 1) * self.block)
                for position in range(max(first, block * self.block), end):
                    if self.values[position] > least:
                        return position
            block += 1
        return len(self.values)


_START = -1


class PositionMemory:
    """Starts with no repeats; :meth:`change` adds and removes them. A step is named by the position that it runs.

    A storage that is only read is alive from the start of the position, one that is written from that step on. It dies
    after the last step that touches it, unless a later position needs it.
    """

    def __init__(self, tables: Tables, position: int) -> None:
        self._tables, self._position = tables, position
        self._allocated: defaultdict[int, int] = defaultdict(int)  # bytes, by the step that allocates them
        self._freed: defaultdict[int, int] = defaultdict(int)  # bytes, by the step after which they are freed
        self._born: dict[int, int] = {}
        self._uses: dict[int, list[int]] = {}
        self._needed_later: set[int] = set()
        reads, writes = tables.first_reads[position], tables.first_writes[position]
        for storage in (*reads, *(tables.staying if position == tables.forward - 1 else ())):
            self._use(storage, position, True)
        for storage in writes:
            self._use(storage, position, True, writes=True)

    def change(self, position: int, added: bool) -> None:
        for storage in self._tables.repeat_reads[position]:
            self._use(storage, position, added)
        for storage in self._tables.repeat_writes[position]:
            self._use(storage, position, added, writes=True)

    def set_needed_later(self, storage: int, is_needed: bool) -> None:
        """Set whether a later position needs ``storage``."""
        if storage in self._uses and is_needed != (storage in self._needed_later):
            self._count(storage, -1)
            self._needed_later ^= {storage}
            self._count(storage, 1)

    def storages(self) -> Iterable[int]:
        """The storages that the position touches."""
        return self._uses

    def peak_bytes(self, repeats: Sequence[int]) -> int:
        """The most bytes alive at once of the storages that the position touches.

        Args:
            repeats: those of the position, in their order.
        """
        extra, allocated, freed = self._tables.repeat_extra_bytes, self._allocated, self._freed
        alive, peak = allocated[_START], 0
        for position in repeats:
            alive += allocated[position]
            if alive + extra[position] > peak:
                peak = alive + extra[position]
            alive -= freed[position]
        return max(peak, alive + allocated[self._position] + self._tables.first_extra_bytes[self._position])

    def _use(self, storage: int, step: int, added: bool, writes: bool = False) -> None:
        self._count(storage, -1)
        uses = self._uses.setdefault(storage, [])
        if added:
            insort(uses, step)
        else:
            uses.remove(step)
        if writes and added:
            self._born[storage] = step
        elif writes:
            del self._born[storage]
        if not uses:
            del self._uses[storage]
            self._needed_later.discard(storage)
        self._count(storage, 1)

    def _count(self, storage: int, sign: int) -> None:
        uses = self._uses.get(storage)
        if uses:
            size = sign * self._tables.sizes[storage]
            self._allocated[self._born.get(storage, _START)] += size
            if storage not in self._needed_later:
                self._freed[uses[-1]] += size
