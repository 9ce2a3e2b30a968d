"""Incremental: a schedule that changes by one repeat at a time, with its memory always up to date.

Stage t is the first run at position t, after the repeats that stage t makes for it. A stage *touches* the storages that
it reads or writes. A storage is *born* in a stage that writes it. Between two touches it is alive, unless it is born in
the second one:

    stage     0     1     2     3     4     5     6
    touches   W---------R           w-----R           of a storage that is written, read, written again, read
    bytes     |#########|           |#####|

So a repeat changes the memory of all stages between two touches by one number. Only the stages whose touches change are
simulated again.
"""
from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from itertools import pairwise

from torchckpt.planning.remat.flow.dataflow import Schedule, Tables
from torchckpt.planning.remat.flow.profile import Profile, StageMemory, profile

__all__ = ["Stages"]


class Stages:
    """A schedule that starts without repeats; :meth:`add` and :meth:`remove` change it.

    ``during.at(t)`` is the peak of bytes alive in stage t, as :func:`simulate` computes it.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.repeats: list[list[int]] = [[] for _ in range(tables.count)]
        self.touches: list[list[int]] = [[] for _ in tables.sizes]
        self.births: list[set[int]] = [set() for _ in tables.sizes]
        self.readers: list[dict[int, int]] = [{} for _ in tables.sizes]
        self.inside = list(tables.plain_bytes)
        self._memories: dict[int, StageMemory] = {}
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
        for storage in tables.held:
            end = tables.forward - 1
            self.readers[storage][end] = self.readers[storage].get(end, 0) + 1
            if end not in self.touches[storage]:
                insort(self.touches[storage], end)
                self.inside[end] += tables.sizes[storage]
                tables.plain_bytes[end] = self.inside[end]

    def _profile(self) -> Profile:
        tables, changes = self.tables, [0] * (self.tables.count + 2)
        for storage, touches in enumerate(self.touches):
            for before, after in pairwise(touches):
                changes[before + 1] += tables.sizes[storage]
                changes[after] -= tables.sizes[storage]
        across, bytes_during = 0, []
        for stage in range(tables.count):
            across += changes[stage]
            bytes_during.append(across + tables.floor_bytes[stage] + self.inside[stage])
        return profile(bytes_during)

    @property
    def peak_bytes(self) -> int:
        return self.during.most(0, self.tables.count)

    def schedule(self) -> Schedule:
        order = self.tables.order
        return tuple(order[p] for stage, repeats in enumerate(self.repeats) for p in (*repeats, stage))

    def alive(self, storage: int, stage: int) -> bool:
        """Whether ``storage`` is alive in ``stage``, so that a repeat there can read it at no cost in memory."""
        touches = self.touches[storage]
        index = bisect_left(touches, stage)
        if index == len(touches):
            return False
        return touches[index] == stage or (index > 0 and touches[index] not in self.births[storage])

    def alive_after(self, storage: int, stage: int) -> bool:
        """Whether ``stage`` or a later one reads the copy of ``storage`` that is alive or written in ``stage``."""
        return stage in self.readers[storage] or self._stays(storage, stage)

    def waits_for(self, storage: int, stage: int) -> bool:
        """Whether ``storage`` is alive before ``stage`` only for one reader in that stage."""
        return self.readers[storage][stage] == 1 and stage not in self.births[storage] and (
            not self._stays(storage, stage)
        )

    def before(self, storage: int, stage: int) -> int:
        """The last stage before ``stage`` that touches ``storage``."""
        touches = self.touches[storage]
        return touches[bisect_left(touches, stage) - 1]

    def add(self, stage: int, *positions: int) -> int:
        """Repeat ``positions`` in ``stage``. Returns the first stage whose memory may have changed."""
        return self.change([(stage, position, True) for position in positions])

    def remove(self, stage: int, position: int) -> int:
        """Remove the repeat of ``position`` in ``stage``. Returns the first stage whose memory may have changed."""
        return self.change([(stage, position, False)])

    def change(self, changes: Iterable[tuple[int, int, bool]]) -> int:
        """Apply several changes at once; each is a stage, a position, and whether the repeat is added or removed."""
        stale: dict[int, set[int]] = {}  # by stage, storages that may now be needed after it, or no longer
        for change in changes:
            self.log.append(change)
            self._change(*change, stale)
        for stage, storages in stale.items():
            inside = self._inside(stage, storages)
            if inside != self.inside[stage]:
                self.during.add(stage, stage + 1, inside - self.inside[stage])
                self.inside[stage] = inside
        return min(stale)

    def back(self, mark: int) -> None:
        """Undo the changes logged after ``mark``, a length of :attr:`log`."""
        log = self.log
        if len(log) > mark:
            undone = [(stage, position, not added) for stage, position, added in reversed(log[mark:])]
            self.change(undone)
            del log[mark:]

    def copy(self) -> list[tuple[int, ...]]:
        """The repeats of each stage, for :meth:`become`."""
        return [tuple(repeats) for repeats in self.repeats]

    def become(self, copied: list[tuple[int, ...]]) -> None:
        """Replace all repeats by those of a :meth:`copy`."""
        changes = []
        for stage, (now, then) in enumerate(zip(self.repeats, copied)):
            if tuple(now) != then:
                changes += [(stage, position, False) for position in now if position not in then]
                changes += [(stage, position, True) for position in then if position not in now]
        if changes:
            self.change(changes)

    def useless(self, stage: int, position: int) -> bool:
        """Whether nothing reads the storages that this repeat writes."""
        return not any(self.alive_after(storage, stage) for storage in self.tables.repeat_writes[position])

    def _change(self, stage: int, position: int, added: bool, stale: dict[int, set[int]]) -> None:
        tables, sign = self.tables, 1 if added else -1
        self.work += 2
        self.cost += sign * tables.repeat_cost[position]
        if added:
            insort(self.repeats[stage], position)
        else:
            self.repeats[stage].remove(position)
        here = stale.setdefault(stage, set())
        if stage in self._memories:
            self._memories[stage].change(position, added)
        for storage in tables.repeat_writes[position]:
            here.add(storage)
            stale.setdefault(self._touch(storage, stage, 0, sign), set()).add(storage)
        for storage in tables.repeat_reads[position]:
            here.add(storage)
            stale.setdefault(self._touch(storage, stage, sign, 0), set()).add(storage)

    def _touch(self, storage: int, stage: int, reads: int, births: int) -> int:
        """Change how ``stage`` touches ``storage``. Returns the last stage before it that touches the storage."""
        touches, born, readers = self.touches[storage], self.births[storage], self.readers[storage]
        index = bisect_left(touches, stage)
        touched = index < len(touches) and touches[index] == stage
        before = touches[index - 1]
        after_index = index + touched
        right = after_index < len(touches) and touches[after_index] not in born
        left = stage not in born if touched else right
        if births > 0:
            born.add(stage)
        elif births < 0:
            born.discard(stage)
        if reads:
            number = readers.get(stage, 0) + reads
            if number:
                readers[stage] = number
            else:
                del readers[stage]
        touches_now = stage in readers or stage in born
        if touches_now != touched:
            if touches_now:
                touches.insert(index, stage)
            else:
                del touches[index]
        left_now = stage not in born if touches_now else right
        size = self.tables.sizes[storage]
        if left_now != left:
            self.during.add(before + 1, stage, size if left_now else -size)
        point = (right and not touches_now) - (right and not touched)
        if point:
            self.during.add(stage, stage + 1, point * size)
        return before

    def _inside(self, stage: int, storages: Iterable[int]) -> int:
        """The peak bytes in ``stage`` of the storages that it touches.

        Args:
            storages: those that may now be needed after the stage, or no longer.
        """
        repeats = self.repeats[stage]
        if not repeats:
            self._memories.pop(stage, None)
            return self.tables.plain_bytes[stage]
        self.work += len(repeats) // 4
        memory = self._memories.get(stage)
        if memory is None:
            memory = self._memories[stage] = StageMemory(self.tables, stage)
            for position in repeats:
                memory.change(position, added=True)
            storages = memory.storages()
        for storage in storages:
            memory.set_needed_later(storage, self._stays(storage, stage))
        return memory.peak_bytes(repeats)

    def _stays(self, storage: int, stage: int) -> bool:
        """Whether ``storage`` is still alive when ``stage`` ends, for a later one."""
        touches = self.touches[storage]
        index = bisect_right(touches, stage)
        return index < len(touches) and touches[index] not in self.births[storage]
