"""Stage memory: the bytes alive during the steps of one stage, its repeats and then its first run."""
from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Sequence

from torchckpt.planning.remat.flow.dataflow import Tables

__all__ = ["StageMemory"]

_START = -1


class StageMemory:
    """Starts with no repeats; :meth:`change` adds and removes them. A step is named by the position that it runs.

    A storage that the stage only reads is alive from its start, one that it writes from the writing step on. It dies
    after the last step that touches it, unless a later stage needs it.
    """

    def __init__(self, tables: Tables, stage: int) -> None:
        self._tables, self._stage = tables, stage
        self._allocated: defaultdict[int, int] = defaultdict(int)  # bytes, by the step that allocates them
        self._freed: defaultdict[int, int] = defaultdict(int)  # bytes, by the step after which they are freed
        self._born: dict[int, int] = {}
        self._uses: dict[int, list[int]] = {}
        self._needed_later: set[int] = set()
        reads, writes = tables.first_reads[stage], tables.first_writes[stage]
        for storage in (*reads, *(tables.held if stage == tables.forward - 1 else ())):
            self._use(storage, stage, True)
        for storage in writes:
            self._use(storage, stage, True, writes=True)

    def change(self, position: int, added: bool) -> None:
        for storage in self._tables.repeat_reads[position]:
            self._use(storage, position, added)
        for storage in self._tables.repeat_writes[position]:
            self._use(storage, position, added, writes=True)

    def set_needed_later(self, storage: int, is_needed: bool) -> None:
        """Set whether a later stage needs ``storage``."""
        if storage in self._uses and is_needed != (storage in self._needed_later):
            self._count(storage, -1)
            self._needed_later ^= {storage}
            self._count(storage, 1)

    def storages(self) -> Iterable[int]:
        """The storages that the stage touches."""
        return self._uses

    def peak_bytes(self, repeats: Sequence[int]) -> int:
        """The most bytes alive at once of the storages that the stage touches.

        Args:
            repeats: the repeats of the stage in their order.
        """
        extra, allocated, freed = self._tables.repeat_extra_bytes, self._allocated, self._freed
        alive, peak = allocated[_START], 0
        for position in repeats:
            alive += allocated[position]
            if alive + extra[position] > peak:
                peak = alive + extra[position]
            alive -= freed[position]
        return max(peak, alive + allocated[self._stage] + self._tables.first_extra_bytes[self._stage])

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
