"""Engines: the compute of one rank, and the engines beside it that copy blocks to its host and back.

There are two engines, one for each direction; of a half-duplex link one for both. Each copies what is queued, in that
order. A copy out is queued when the forward of its block has ended. A copy back is queued at the boundary of its issue,
and starts when the copy out has ended. What the compute waits for: :class:`~torchckpt.planning.work.host.Move`. The
search simulates the same in :mod:`~torchckpt.planning.plan.away.rank`.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain

from torchckpt.planning.figures import Copy
from torchckpt.planning.order.schedule import BACKWARDS, Kind
from torchckpt.planning.step.boundary import Place, Places
from torchckpt.planning.step.memory import Curve
from torchckpt.planning.work.block import Stage
from torchckpt.planning.work.host import Host

__all__ = ["Engines", "host_curve", "host_peak"]


class Engines:
    """The compute and the copies of one rank in one run: called for each action in turn with the time at which it may
    start, it returns when that ends, as :func:`~torchckpt.planning.order.program.run` takes it."""

    def __init__(
        self, rank: int, places: Places, late_seconds: Iterable[float | None], stages: Sequence[Stage], host: Host
    ) -> None:
        """``late_seconds``: of each action, if it has a late recompute, which is an action of its own in a program."""
        self.copies: list[Copy] = []
        """In the order in which they were queued."""
        self.waited_seconds = 0.0
        """The seconds that the compute waited for copies."""
        self._rank, self._stages, self._host = rank, stages, host
        self._rest: Iterator[tuple[Sequence[Place], float | None]] = iter(list(zip(places, late_seconds)))
        self._backward_end: float | None = None
        self._now = self._drag = 0.0
        self._free = [0.0, 0.0]
        self._ends: dict[tuple[tuple[int, ...], bool], float] = {}
        self._away = _away(places)

    def __call__(self, start: float) -> float:
        if self._backward_end is not None:
            end, self._backward_end = self._backward_end, None
            return end
        places, late = next(self._rest)
        for place in places:
            self._run(place, start)
        if late is None:
            return self._now
        self._backward_end = self._now  # replays go to and fro with the backward; they are shown together, first
        return start + late

    def _run(self, place: Place, arrived: float) -> None:
        stage, kind, i = place.action
        block, due = (stage, i, place.boundary.block), self._now
        awaited = due
        for move, is_issued in place.moves:
            if is_issued:
                self._copy(move[:3], awaited, is_back=True)
            else:
                awaited = max(awaited, self._ends[move[:3], False])
        if kind in BACKWARDS and block in self._away:
            awaited = max(awaited, self._ends[block, True])
        start = max(arrived, awaited)
        self.waited_seconds += start - max(due, arrived)
        self._now, self._drag = start + place.seconds + self._drag, 0.0
        if kind is Kind.FORWARD and block in self._away:
            self._copy(block, self._now, is_back=False)

    def _copy(self, block: tuple[int, ...], queued: float, is_back: bool) -> None:
        """Queue a copy of a block: stage, micro-batch, index."""
        stage, i, index = block
        amount = self._stages[stage].moved_bytes(index)
        seconds = amount / (self._host.back_rate if is_back else self._host.out_rate)
        engine = 0 if self._host.half_duplex else int(is_back)
        start = max(queued, self._free[engine], self._ends[block, False] if is_back else 0.0)
        self._free[engine] = self._ends[block, is_back] = start + seconds
        self._drag += self._host.drag * seconds
        self.copies.append(Copy(self._rank, stage, i, index, is_back, start, start + seconds, amount))


def _away(places: Places) -> set[tuple[int, ...]]:
    return {move[:3] for place in chain.from_iterable(places) for move, _ in place.moves}


def host_curve(copies: Iterable[Copy]) -> Curve:
    """The bytes of one rank on its host over time: from the start of a copy out to the end of the copy back."""
    changes = [(copy.end_seconds, -copy.bytes) if copy.is_back else (copy.start_seconds, copy.bytes) for copy in copies]
    changes.sort()
    return ((0.0, 0.0), *zip((seconds for seconds, _ in changes), accumulate(amount for _, amount in changes)))


def host_peak(places: Places, stages: Sequence[Stage]) -> float:
    """The most bytes of one rank on its host, by position: of a block from the end of its forward until its backward
    begins. What comes at a boundary comes before what goes there."""
    away, changes = _away(places), [0.0]
    for (_, block), (stage, kind, i), *_ in chain.from_iterable(places):
        if (stage, i, block) in away and (kind is Kind.FORWARD or kind in BACKWARDS):
            moved = stages[stage].moved_bytes(block)
            changes.append(moved if kind is Kind.FORWARD else -moved)
    return max(accumulate(changes))
