"""Incremental: a schedule that changes by one repeat at a time, with its memory always up to date.

Position t has the t-th first run and, right before it, the repeats that are made for it. It *touches* the storages that
it reads or writes. A storage is *born* at a position that writes it. Between two touches it is alive, unless it is born
at the second one:

    position  0     1     2     3     4     5     6
    touches   W---------R           w-----R           of a storage that is written, read, written again, read
    bytes     |#########|           |#####|

So a repeat changes the memory of all positions between two touches by one number. Only the positions whose touches
change are simulated again. (That is a second account beside :func:`memory.simulate`: a search makes thousands of
changes, and the whole schedule would take its length for each.) In the code, ``repeated`` is the position of the first
run that a repeat runs again.
"""
from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from torchckpt.planning.remat.flow.dataflow import Schedule, Tables

__all__ = ["Draft", "Profile"]


class Draft:
    """A schedule that starts without repeats; :meth:`add` and :meth:`remove` change it.

    ``during.at(t)`` is the peak of bytes alive at position t, as :func:`simulate` computes it.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.repeats: list[list[int]] = [[] for _ in range(tables.count)]
        self.touches: list[list[int]] = [[] for _ in tables.sizes]
        self.births: list[set[int]] = [set() for _ in tables.sizes]
        self.readers: list[dict[int, int]] = [{} for _ in tables.sizes]
        self.inside = list(tables.plain_bytes)
        self.cost = 0.0
        self.work = 0
        self.log: list[tuple[int, int, bool]] = []
        self._first_runs()
        self.during = self._profile()

    def _first_runs(self) -> None:
        tables = self.tables
        for position in range(tables.count):
            for storage in tables.first_writes[position]:
                self.births[storage].add(position)
                self.touches[storage].append(position)
            for storage in tables.first_reads[position]:
                self.readers[storage][position] = 1
                self.touches[storage].append(position)
        for storage in tables.staying:
            end = tables.forward - 1
            self.readers[storage][end] = self.readers[storage].get(end, 0) + 1
            if end not in self.touches[storage]:
                insort(self.touches[storage], end)

    def _profile(self) -> Profile:
        tables, changes = self.tables, [0] * (self.tables.count + 2)
        for storage, touches in enumerate(self.touches):
            for before, after in pairwise(touches):
                changes[before + 1] += tables.sizes[storage]
                changes[after] -= tables.sizes[storage]
        return Profile([sum(parts) for parts in zip(accumulate(changes), tables.floor_bytes, self.inside)])

    @property
    def peak_bytes(self) -> int:
        return self.during.most(0, self.tables.count)

    def schedule(self) -> Schedule:
        order = self.tables.order
        return tuple(order[p] for position, repeats in enumerate(self.repeats) for p in (*repeats, position))

    def all_repeats(self) -> list[tuple[int, int]]:
        """Each repeat: the position before which it runs, and what it repeats."""
        return [(position, repeated) for position, repeats in enumerate(self.repeats) for repeated in repeats]

    def alive(self, storage: int, position: int) -> bool:
        """Whether ``storage`` is alive at ``position``, so that a repeat there can read it at no cost in memory."""
        touches = self.touches[storage]
        index = bisect_left(touches, position)
        if index == len(touches):
            return False
        return touches[index] == position or (index > 0 and touches[index] not in self.births[storage])

    def alive_after(self, storage: int, position: int) -> bool:
        """Whether ``position`` or a later one reads the copy of ``storage`` that is alive or written there."""
        return position in self.readers[storage] or self._stays(storage, position)

    def waits_for(self, storage: int, position: int) -> bool:
        """Whether ``storage`` is alive before ``position`` only for one reader there."""
        return self.readers[storage][position] == 1 and position not in self.births[storage] and (
            not self._stays(storage, position)
        )

    def before(self, storage: int, position: int) -> int:
        """The last position before ``position`` that touches ``storage``."""
        touches = self.touches[storage]
        return touches[bisect_left(touches, position) - 1]

    def add(self, position: int, *repeats: int) -> int:
        """Add ``repeats`` at ``position``. Returns the first position whose memory may have changed."""
        return self.change([(position, repeated, True) for repeated in repeats])

    def remove(self, position: int, repeated: int) -> int:
        """Remove a repeat at ``position``. Returns the first position whose memory may have changed."""
        return self.change([(position, repeated, False)])

    def change(self, changes: Iterable[tuple[int, int, bool]]) -> int:
        """Apply several changes: a position, what is repeated there, and whether the repeat is added or removed."""
        stale = set[int]()  # positions whose storages are touched otherwise now, or needed after them
        for change in changes:
            self.log.append(change)
            self._change(*change, stale)
        for position in stale:
            inside = self._inside(position)
            if inside != self.inside[position]:
                self.during.add(position, position + 1, inside - self.inside[position])
                self.inside[position] = inside
        return min(stale)

    def back(self, mark: int) -> None:
        """Undo the changes logged after ``mark``, a length of :attr:`log`."""
        log = self.log
        if len(log) > mark:
            undone = [(position, repeated, not added) for position, repeated, added in reversed(log[mark:])]
            self.change(undone)
            del log[mark:]

    def copy(self) -> list[tuple[int, ...]]:
        """The repeats of each position, for :meth:`become`."""
        return [tuple(repeats) for repeats in self.repeats]

    def become(self, copied: list[tuple[int, ...]]) -> None:
        """Replace all repeats by those of a :meth:`copy`."""
        changes = []
        for position, (now, then) in enumerate(zip(self.repeats, copied)):
            if tuple(now) != then:
                changes += [(position, repeated, False) for repeated in now if repeated not in then]
                changes += [(position, repeated, True) for repeated in then if repeated not in now]
        if changes:
            self.change(changes)

    def _change(self, position: int, repeated: int, added: bool, stale: set[int]) -> None:
        tables, sign = self.tables, 1 if added else -1
        self.work += 2
        self.cost += sign * tables.repeat_cost[repeated]
        if added:
            insort(self.repeats[position], repeated)
        else:
            self.repeats[position].remove(repeated)
        stale.add(position)
        for storage in tables.repeat_writes[repeated]:
            stale.add(self._touch(storage, position, 0, sign))
        for storage in tables.repeat_reads[repeated]:
            stale.add(self._touch(storage, position, sign, 0))

    def _touch(self, storage: int, position: int, reads: int, births: int) -> int:
        """Change how ``position`` touches ``storage``. Returns the last position before it that touches the storage."""
        touches, born, readers = self.touches[storage], self.births[storage], self.readers[storage]
        index = bisect_left(touches, position)
        touched = index < len(touches) and touches[index] == position
        before = touches[index - 1]
        after_index = index + touched
        right = after_index < len(touches) and touches[after_index] not in born
        left = position not in born if touched else right
        if births > 0:
            born.add(position)
        elif births < 0:
            born.discard(position)
        if reads:
            number = readers.get(position, 0) + reads
            if number:
                readers[position] = number
            else:
                del readers[position]
        touches_now = position in readers or position in born
        if touches_now != touched:
            if touches_now:
                touches.insert(index, position)
            else:
                del touches[index]
        left_now = position not in born if touches_now else right
        size = self.tables.sizes[storage]
        if left_now != left:
            self.during.add(before + 1, position, size if left_now else -size)
        point = (right and not touches_now) - (right and not touched)
        if point:
            self.during.add(position, position + 1, point * size)
        return before

    def _inside(self, position: int) -> int:
        """The peak bytes at ``position`` of the storages that it touches."""
        tables, repeats = self.tables, self.repeats[position]
        if not repeats:
            return tables.plain_bytes[position]
        self.work += len(repeats) // 4
        born: dict[int, int] = {}  # what is only read is alive from the start
        last: dict[int, int] = {}
        for step, repeated in enumerate(repeats):
            for storage in tables.repeat_reads[repeated]:
                last[storage] = step
            for storage in tables.repeat_writes[repeated]:
                born[storage] = last[storage] = step
        end, sizes = len(repeats), tables.sizes
        last.update(dict.fromkeys(tables.first_touches[position], end))
        born.update(dict.fromkeys(tables.first_writes[position], end))
        if position == tables.forward - 1:
            last.update(dict.fromkeys(tables.staying, end))
        changes = [0] * (end + 2)
        for storage, step in last.items():
            changes[born.get(storage, 0)] += sizes[storage]
            touches = self.touches[storage]
            after = bisect_right(touches, position)
            if step < end and (after == len(touches) or touches[after] in self.births[storage]):  # it does not stay
                changes[step + 1] -= sizes[storage]
        peak = alive = 0
        for repeated, change in zip(repeats, changes):
            alive += change
            if alive + tables.repeat_extra_bytes[repeated] > peak:
                peak = alive + tables.repeat_extra_bytes[repeated]
        return max(peak, alive + changes[end] + tables.first_extra_bytes[position])

    def _stays(self, storage: int, position: int) -> bool:
        """Whether ``storage`` is still alive when ``position`` ends, for a later one."""
        touches = self.touches[storage]
        index = bisect_right(touches, position)
        return index < len(touches) and touches[index] not in self.births[storage]


class Profile:
    """The bytes of each position, with quick changes and maxima of ranges of positions.

    Square root decomposition: a change of a range takes O(sqrt(n)), as whole blocks change by one number each.
    """

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
