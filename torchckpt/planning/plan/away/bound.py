"""Bound: a lower bound on the seconds of a step, for all plans that may also send blocks to a host.

The windows are those of :mod:`~torchckpt.planning.plan.search.bound`, of stages in which a block that is not on the
device holds what never moves. What is lost in a window of D seconds, so that it is not there when its backward needs
it, is recomputed or copied back within the window. The link carries at most rate * D bytes::

    D >= work + sum over layers of gain * max(0, lost - rate * D)

*Turns* count what copies hold. Where a rank turns from a forward (of v) to a backward (of u), there are, of each visit
alive, the blocks that are neither dropped nor on the host; of v, all that were not copied out since its forward began;
of u, all that are not copied back until its backward ends. A turn where the visits alive have E bytes more than fit
needs E bytes that are dropped, or on the host. Over the N turns in a visit's life, q of them not its own, and of all
visits that are used in the window::

    N * dropped + q * away + (what is copied in these forwards and backwards) >= sum of E

All that was away comes back in the window, and the forwards and backwards do not overlap, so that ``away`` and the
last term are at most rate * D each. Nor are there more blocks away than those that are not dropped.

A host with room for H bytes is no better than H more bytes on the device.
"""
from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from torchckpt.planning.order.program import run
from torchckpt.planning.plan.problem import Problem
from torchckpt.planning.plan.search.lane import FORWARD, Lane
from torchckpt.planning.plan.search.window import Capacity, Window
from torchckpt.planning.work.block import Stage

__all__ = ["bound_seconds"]

_MOST_WINDOWS = 100
"""The most windows of a rank at once. Those with the lowest bounds are closed first."""


def bound_seconds(problem: Problem) -> float:
    """A lower bound on the seconds of every plan; infinite if no plan fits."""
    host = problem.host
    if host is None:
        return problem.bound_seconds
    empty = replace(problem, stages=tuple(map(_emptied, problem.stages)), host=None)
    if empty.too_small:
        return math.inf
    pairs = zip(empty.lanes, _scales(problem, empty))
    ranks = [_Rank(lane, (host.out_rate * scale, host.back_rate * scale)) for lane, scale in pairs]
    run(empty.program, [rank.advance for rank in ranks])
    everything = [sum(holding.full_bytes for holding in lane.holdings) for lane in problem.lanes]
    rooms = zip(problem.budget_bytes, problem.host_bytes, everything)
    both = problem.within([min(budget + room, max(budget, most)) for budget, room, most in rooms])
    return max([both.bound_seconds, *(rank.last_seconds() for rank in ranks)])


def _emptied(stage: Stage) -> Stage:
    """The stage in which a block that is dropped holds what never moves."""
    stays = [block.saved_bytes - stage.moved_bytes(index) for index, block in enumerate(stage.blocks)]
    blocks = (
        replace(block, boundary_bytes=min(block.boundary_bytes, least), moved_bytes=None)
        for block, least in zip(stage.blocks, stays)
    )
    return replace(stage, blocks=tuple(blocks), message_bytes=stage.arriving_bytes)


def _scales(problem: Problem, empty: Problem) -> list[float]:
    """For each rank, the most bytes that a block frees for a byte that moves."""
    scales = [1.0] * len(problem.lanes)
    for rank, stage, other in zip(problem.schedule.placement, problem.stages, empty.stages):
        for index, block in enumerate(other.blocks):
            if moved := stage.moved_bytes(index):
                scales[rank] = max(scales[rank], block.freed_bytes / moved)
    return scales


class _Turn(NamedTuple):
    """A place where a rank turns from a forward to a backward, and the bytes that exceed its budget there."""

    place: int
    last_use: int
    """The place of the last backward of the visits alive."""
    excess_bytes: float
    made: int
    used: int
    alive: tuple[int, ...]


class _Losses(Window):
    """A window that also counts the bytes that are lost in each layer."""

    __slots__ = ("begin_place", "begin_seconds", "lost_bytes", "turns")

    def __init__(self, capacity: Capacity, place: int, begin_seconds: float, alive: Collection[int]) -> None:
        super().__init__(capacity, place, 0.0, alive)
        self.begin_place, self.begin_seconds = place, begin_seconds
        self.lost_bytes = [0.0] * len(capacity.gains)
        self.turns = _Turns()

    def _backward(self, layer: int, visit: int, place: int) -> float:
        lost = super()._backward(layer, visit, place)
        self.lost_bytes[layer] += lost
        return lost


class _Turns:
    """The turns of a window, summed up. Sizes are the bytes of all blocks of a visit."""

    def __init__(self) -> None:
        self.excess_bytes = self.forward_seconds = self.backward_seconds = 0.0
        self.both_bytes = self.made_bytes = self.used_bytes = 0.0
        """The sizes of the visits alive at each turn: but for those that are made and used there; the one or the other
        of them."""
        self.counts: dict[int, int] = {}
        """By visit, the turns in its life; below, those that are not its own."""
        self.others: dict[int, int] = {}
        self.most = self.rest = 0
        """The most of either."""

    def add(self, turn: _Turn, forward_seconds: float, backward_seconds: float, sizes: Mapping[int, float]) -> None:
        self.excess_bytes += turn.excess_bytes
        self.forward_seconds += forward_seconds
        self.backward_seconds += backward_seconds
        every, own = sum([sizes[visit] for visit in turn.alive]), {turn.made, turn.used}
        self.both_bytes += every - sum([sizes[visit] for visit in own])
        self.made_bytes += every - sizes[turn.made]
        self.used_bytes += every - sizes[turn.used]
        for visit in turn.alive:
            self.counts[visit] = self.counts.get(visit, 0) + 1
            self.others[visit] = self.others.get(visit, 0) + (visit not in own)
        self.most, self.rest = max(self.counts.values()), max(self.others.values())


class _Rank:
    """The earliest times of one rank, action by action."""

    def __init__(self, lane: Lane, rates: tuple[float, float]) -> None:
        """``rates``: the bytes a second that go out, and come back."""
        self.lane, (self.out, self.back) = lane, rates
        self.capacity = Capacity(lane)
        self.capacity.has_groups = False
        self.gain = self.capacity.gains[0] if self.capacity.gains else 0.0
        self.windows: list[_Losses] = []
        self.turns: list[_Turn] = []
        """Those that are not yet counted, by their last use."""
        self.alive: set[int] = set()
        self.place = 0

    def advance(self, start_seconds: float) -> float:
        """Add one action, which cannot start before ``start_seconds``. Returns its earliest end."""
        lane, place = self.lane, self.place
        self.windows.append(_Losses(self.capacity, place, start_seconds, self.alive))
        visit, kind = lane.visit_at[place], lane.kinds[place]
        if kind is FORWARD:
            self.alive.add(visit)
        elif self.gain and place and lane.kinds[place - 1] is FORWARD:
            self._turn(place, visit)
        waits = self.capacity.passed(place, self.windows)
        self._count_turns()
        self.alive -= {visit} if kind is not FORWARD else set()
        ends = list(map(self._end, self.windows, waits))
        latest = max(ends)
        while len(self.windows) > _MOST_WINDOWS:
            lowest = min(range(len(ends)), key=ends.__getitem__)
            del ends[lowest], self.windows[lowest]
        self.place += 1
        return latest

    def last_seconds(self) -> float:
        """The earliest end of the rank's work, weight gradients included."""
        return max((self._end(window, window.wait_seconds) for window in self.windows), default=0.0)

    def _turn(self, place: int, visit: int) -> None:
        lane, capacity = self.lane, self.capacity
        excess = sum(capacity.totals[0][lane.holdings[other]] for other in self.alive) - capacity.left_bytes[place - 1]
        if excess > 0.0:
            last = max(lane.backward_place[other] for other in self.alive)
            self.turns.append(_Turn(place, last, excess, lane.visit_at[place - 1], visit, tuple(self.alive)))

    def _count_turns(self) -> None:
        """Turns count from where all that was alive has been used, in the windows that have all of them."""
        lane = self.lane
        due = [turn for turn in self.turns if turn.last_use <= self.place]
        if not due:
            return
        self.turns = [turn for turn in self.turns if turn.last_use > self.place]
        for turn in due:
            made, used = (lane.holdings[visit] for visit in (turn.made, turn.used))
            backward = used.input_grad_seconds if lane.is_split[turn.used] else used.backward_seconds
            sizes = {visit: self.capacity.totals[0][lane.holdings[visit]] for visit in turn.alive}
            for window in self.windows:
                if window.begin_place < turn.place:
                    window.turns.add(turn, made.forward_seconds, backward, sizes)

    def _end(self, window: _Losses, waits: float) -> float:
        work = window.plain_seconds + waits
        return window.begin_seconds + max(self._by_losses(window, work), self._by_turns(window.turns, work))

    def _by_losses(self, window: _Losses, work: float) -> float:
        """The least D with D >= work + sum of gain * max(0, lost - rate * D): of the layers that lose most, as many as
        make it longest."""
        longest, top, bottom = work, work, 1.0
        for lost, gain in sorted(zip(window.lost_bytes, self.capacity.gains), reverse=True):
            top, bottom = top + gain * lost, bottom + gain * self.back
            longest = max(longest, top / bottom)
        return longest

    def _by_turns(self, turns: _Turns, work: float) -> float:
        """The same for each way to count the turns."""
        if not turns.most:
            return work
        out, back, excess, gain = self.out, self.back, turns.excess_bytes, self.gain
        return max(
            _least(work, gain / turns.most, excess, turns.rest * back + max(out, back)),
            _least(work, gain / 2, excess - turns.both_bytes, max(out, back)),
            _least(work, gain, excess - turns.made_bytes + out * turns.backward_seconds, out),
            _least(work, gain, excess - turns.used_bytes + back * turns.forward_seconds, back),
        )


def _least(work: float, gain: float, lost: float, rate: float) -> float:
    """The least D with D >= work + gain * max(0, lost - rate * D)."""
    return max(work, (work + gain * lost) / (1 + gain * rate))
