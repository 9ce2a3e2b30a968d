"""Copies: the compute of one rank, and the engines beside it that copy blocks to its host and back.

There are two engines, one for each direction; of a half-duplex link one for both. Each copies what is queued, in that
order. A copy out is queued when the forward of its block has ended. A copy back is queued at the boundary of its issue,
and starts when the copy out has ended. What the compute waits for stands in :mod:`~torchckpt.planning.work.move`.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from torchckpt.planning.figures import Copy
from torchckpt.planning.order.schedule import BACKWARDS, Kind
from torchckpt.planning.step.boundary import Place
from torchckpt.planning.step.memory import Curve
from torchckpt.planning.work.block import Stage
from torchckpt.planning.work.host import Host

__all__ = ["Engines", "host_curve", "host_peak"]


class Engines:
    """One run of a rank with copies: a function from the start of its next action to its end, as
    :func:`~torchckpt.planning.order.program.run` takes it."""

    def __init__(
        self,
        rank: int,
        places: Sequence[Sequence[Place]],
        late_seconds: Sequence[float | None],
        stages: Sequence[Stage],
        host: Host,
    ) -> None:
        """
        Args:
            places: of each action.
            late_seconds: of each action, the seconds of its late recompute, which the program runs as an action of its
                own; None if it has none.
        """
        self.copies: list[Copy] = []
        """In the order in which they were queued."""
        self.times: list[tuple[float, float, float, float]] = []
        """Of each place: when the compute came to it, when the releases there were done, and the start and the end of
        its piece."""
        self.waited_seconds = 0.0
        """The seconds that the compute waited for copies."""
        self._rank, self._stages, self._host = rank, stages, host
        self._rest = iter(list(zip(places, late_seconds)))
        self._end_of_backward: float | None = None
        self._now = self._drag = 0.0
        self._free = [0.0, 0.0]
        self._out: dict[tuple[int, int, int], float] = {}
        self._back: dict[tuple[int, int, int], float] = {}
        self._away = {move[:3] for action in places for place in action for move in place.released}

    def __call__(self, start: float) -> float:
        if self._end_of_backward is not None:
            end, self._end_of_backward = self._end_of_backward, None
            return end
        places, late = next(self._rest)
        for place in places:
            self._run(place, start)
        if late is None:
            return self._now
        self._end_of_backward = self._now  # replays go to and fro with the backward; they are shown together, first
        return start + late

    def _run(self, place: Place, arrived: float) -> None:
        stage, kind, i = place.action
        block = stage, i, place.piece.block
        due = self._now
        for move in place.issued:
            self._copy(move[:3], due, is_back=True)
        released = max([due, *(self._out[move[:3]] for move in place.released)])
        start = max(released, arrived, self._back.get(block, 0.0) if kind in BACKWARDS else 0.0)
        self.waited_seconds += start - max(due, arrived)
        self._now = start + place.piece.seconds + self._drag
        self._drag = 0.0
        self.times.append((due, released, start, self._now))
        if kind is Kind.FORWARD and block in self._away:
            self._copy(block, self._now, is_back=False)

    def _copy(self, block: tuple[int, int, int], queued: float, is_back: bool) -> None:
        """Queue a copy of a block: stage, micro-batch, index."""
        amount = self._stages[block[0]].moved_bytes(block[2])
        seconds = amount / (self._host.back_rate if is_back else self._host.out_rate)
        engine = 0 if self._host.half_duplex else int(is_back)
        start = max(queued, self._free[engine], self._out[block] if is_back else 0.0)
        self._free[engine] = end = start + seconds
        (self._back if is_back else self._out)[block] = end
        self._drag += self._host.drag * seconds
        self.copies.append(Copy(self._rank, *block, is_back, start, end, amount))


def host_curve(copies: Iterable[Copy]) -> Curve:
    """The bytes of one rank on its host over time: from the start of a copy out to the end of the copy back."""
    changes = [(copy.end_seconds, -copy.bytes) if copy.is_back else (copy.start_seconds, copy.bytes) for copy in copies]
    alive, points = 0.0, [(0.0, 0.0)]
    for seconds, amount in sorted(changes):
        alive += amount
        points.append((seconds, alive))
    return tuple(points)


def host_peak(places: Iterable[Iterable[Place]], stages: Sequence[Stage]) -> float:
    """The most bytes of one rank on its host, by position: of a block from the end of its forward until its backward
    begins. What comes at a boundary comes before what goes there."""
    flat = list(chain.from_iterable(places))
    away = {move[:3] for place in flat for move in place.released}
    alive = most = 0.0
    for place in flat:
        stage, kind, i = place.action
        is_away = (stage, i, place.piece.block) in away
        moved = stages[stage].moved_bytes(place.piece.block) if is_away else 0.0
        if kind is Kind.FORWARD:
            most = max(most, alive := alive + moved)
        elif kind in BACKWARDS:
            alive -= moved
    return most
