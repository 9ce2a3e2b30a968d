"""Bound: a lower bound on the seconds of a step, for all plans of a schedule under a byte budget.

Plans may differ in the blocks that they keep, in when they recompute the others, and in when weight gradients run. All
plans have the same order of forwards and backwards on each rank, and the same costs. For any two actions x and y of a
rank, where x is y or runs before y::

    end(y) >= start(x) + the forwards and backwards from x to y
                       + the least recomputation from x on for the backwards from x to y
                       + the weight gradients of backwards from x to y, except those that can wait beyond y

These cannot overlap: they run on one rank, one after the other. Blocks that were recomputed before x have to fit in
memory at x; see :mod:`window`. Weight gradients that wait beyond y have to fit in memory during y. So each pair (x, y)
is an edge of a graph, and so is each message. No step is shorter than the longest path through this graph. One pass
finds the path. It opens a window only after a rank has idled, since any other window gives a lower bound than the one
before it. It closes a window whose bound can never again be above that of another.
"""
from __future__ import annotations

from collections.abc import Sequence

from torchckpt.planning.order.program import Program, run
from torchckpt.planning.plan.search.lane import FORWARD, Lane
from torchckpt.planning.plan.search.window import Capacity, Window

__all__ = ["busiest_seconds", "least_seconds"]

_TINY = 1e-9
_MOST_WINDOWS, _FEWEST_WINDOWS, _WORK = 100, 6, 20_000
"""The most windows of a rank at once, and the fewest; in between, ``_WORK`` over the actions and layers of the rank.
The windows with the lowest bounds are closed first."""


def least_seconds(program: Program, lanes: Sequence[Lane]) -> float:
    """A lower bound on the seconds of every plan. ``program``: the program of the schedule without its weight
    gradients. ``lanes``: one for each rank. Each budget is large enough to recompute everything."""
    ranks = [_Rank(lane) for lane in lanes]
    run(program, [rank.advance for rank in ranks])
    return max((rank.last_seconds() for rank in ranks), default=0.0)


def busiest_seconds(lanes: Sequence[Lane]) -> float:
    """The same for the seconds from the first action of a rank to its last, on the rank that needs most. That rank
    waits for no message."""
    ranks = [_Rank(lane) for lane in lanes]
    for rank in ranks:
        for _ in range(len(rank.lane)):
            rank.advance(0.0)
    return max((rank.last_seconds() for rank in ranks), default=0.0)


class _Rank:
    """The earliest times of one rank, action by action."""

    def __init__(self, lane: Lane) -> None:
        self.lane, self.capacity = lane, Capacity(lane)
        size = max(1, len(lane) * len(self.capacity.gains))
        self.most_windows = min(_MOST_WINDOWS, max(_FEWEST_WINDOWS, _WORK // size))
        self.windows: list[Window] = []
        self.alive: set[int] = set()
        self.place = 0
        self.end_seconds = -1.0

    def advance(self, start_seconds: float) -> float:
        """Add one action, which cannot start before ``start_seconds``. Returns its earliest end."""
        lane, place = self.lane, self.place
        if start_seconds > self.end_seconds * (1 + _TINY):  # the rank has idled
            self.windows.append(Window(self.capacity, place, start_seconds, self.alive))
        waits = self.capacity.passed(place, self.windows)
        self.end_seconds = max(window.seconds + wait for window, wait in zip(self.windows, waits))
        if lane.kinds[place] is FORWARD:
            self.alive.add(lane.visit_at[place])
        else:
            self.alive.remove(lane.visit_at[place])
            self._prune()
        while len(self.windows) > self.most_windows:
            self.windows.remove(min(self.windows, key=lambda window: window.seconds))
        self.place += 1
        return self.end_seconds

    def _prune(self) -> None:
        kept: list[Window] = []
        for window in self.windows:
            while kept and not (is_covered := kept[-1].covers(window)) and window.covers(kept[-1]):
                kept.pop()
            if not kept or not is_covered:
                kept.append(window)
        self.windows = kept

    def last_seconds(self) -> float:
        """The earliest end of the rank's work, weight gradients included."""
        return max((window.seconds + window.wait_seconds for window in self.windows), default=0.0)

