"""Turns: each rank of a group tells the others something, and none waits for ever for one that does not come.

A collective that one rank alone enters ends with the timeout of its group, and names nothing. So ranks write into the
store of the group. They take turns, numbered on each rank; a turn is decided once, by whoever is first: "met" by the
rank that sees all others, "missed" by one that has waited too long. Late ranks pass over a missed turn, and so meet in
the next one::

    rank 0   turn/0 = 1   1/0 = text   waits ... 1/verdict = missed: Absent    turn/0 = 2   2/0 = text   met
    rank 1                                       (passes over turn 1)     turn/1 = 2   2/1 = text        met

The last rank to leave a turn clears it.
"""
from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchckpt.ranks.private import store_of, timeout_of

__all__ = ["Absent", "told_by_all"]

_WARNED_AFTER = timedelta(seconds=10)
_MET, _MISSED = "met", "missed"


class Absent(Exception):
    """Some rank has not come. The text says which, and how long this one has waited."""


def told_by_all(
    text: str, prefix: str, group: dist.ProcessGroup, device: torch.device, waits: str, stacklevel: int = 2
) -> list[str] | None:
    """What each rank of ``group`` tells in this turn, by rank; this one tells ``text``. None: the group has no store.

    A rank waits for half of the timeout of the group, and warns before.

    Args:
        prefix: which turns; those of others are counted apart.
        waits: the begin of the warning, such as ``"schedule.report() waits for"``.

    Raises:
        Absent: a rank does not come.
    """
    store, patience = store_of(group), timeout_of(group, device) / 2
    if store is None:
        return None
    turns = _Turns(PrefixStore(f"torchckpt/{prefix}", store), group.rank(), group.size())
    turn = turns.entered(text)
    warned = min(_WARNED_AFTER, patience / 2)
    absent: list[int] = []
    if not turns.wait(turn, warned):
        warnings.warn(f"{waits} {_ranks(turns.absent(turn))}", stacklevel=stacklevel)
        absent = [] if turns.wait(turn, patience - warned) else turns.absent(turn)
    if turns.decided(turn, _MISSED if absent else _MET) == _MISSED:
        late = f"nothing on {_ranks(absent)}" if absent else "the last after another rank had given up"
        raise Absent(f"{late} within {patience.total_seconds():g} s")
    return turns.left(turn)


class _Turns:
    """The turns of one rank, in the ``store`` of its group."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def entered(self, text: str) -> int:
        """The number of the turn; the first that is not missed."""
        while True:
            turn: int = self._store.add(f"turn/{self._rank}", 1)
            if not self._store.check([f"{turn}/verdict"]):
                self._store.set(f"{turn}/{self._rank}", text)
                return turn

    def wait(self, turn: int, time: timedelta) -> bool:
        """Whether all ranks came, after at most so much time."""
        try:
            self._store.wait(self._keys(turn), time)
        except RuntimeError:  # the time is over; a store that is lost raises again
            return not self.absent(turn)
        return True

    def absent(self, turn: int) -> list[int]:
        return [rank for rank, key in enumerate(self._keys(turn)) if not self._store.check([key])]

    def decided(self, turn: int, verdict: str) -> str:
        """The verdict that came first."""
        first: bytes = self._store.compare_set(f"{turn}/verdict", "", verdict)
        return first.decode()

    def left(self, turn: int) -> list[str]:
        """Leave a turn; what each rank told in it."""
        texts = [self._store.get(key).decode() for key in self._keys(turn)]
        is_last = self._store.add(f"{turn}/left", 1) == self._size
        while is_last and self._store.check([f"{turn}/verdict"]):  # nobody reads this turn, or one before it, again
            for key in (*self._keys(turn), f"{turn}/left", f"{turn}/verdict"):
                self._store.delete_key(key)
            turn -= 1
        return texts

    def _keys(self, turn: int) -> list[str]:
        return [f"{turn}/{rank}" for rank in range(self._size)]


def _ranks(listed: Sequence[int]) -> str:
    return f"rank{'s' * (len(listed) > 1)} {', '.join(map(str, listed))}"
