"""Outlook: the choices of a rank, and what it can expect of the rest of its step, from the times of a step like it.

Copies out are queued when forwards end, and copies back so that each ends right before its use. So follow the bytes
that are on their way out at the end of each forward, and when each copy back has to start.

What a stage takes in a step with a host is a ``Work``, piece by piece.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from torchckpt.planning.plan.search.lane import FORWARD, INPUT_GRAD, Lane
from torchckpt.planning.work.block import Stage
from torchckpt.planning.work.host import Host

__all__ = ["Gene", "Habits", "Outlook", "Times", "Work", "leaving", "returning"]


class Work:
    """Lists over the pieces of a stage: its blocks, and what comes after them. What comes before belongs to the first.

    Of a visit the first ``away`` blocks go to the host, the next ``dropped`` are recomputed, and the rest is kept.
    """

    def __init__(self, stage: Stage, host: Host) -> None:
        pieces, before = (*stage.blocks, stage.after), stage.before
        self.blocks = len(stage.blocks)
        self.forward = [piece.forward_seconds for piece in pieces]
        self.inputs = [piece.input_grad_seconds for piece in pieces]
        self.whole = [piece.input_grad_seconds + piece.weight_grad_seconds for piece in pieces]
        self.saved = [piece.saved_bytes for piece in pieces]
        self.boundary = [piece.boundary_bytes for piece in pieces]
        self.freed = [piece.freed_bytes for piece in pieces]
        self.replay = [piece.recompute_seconds if piece.freed_bytes else 0.0 for piece in pieces]
        self.moved = [stage.moved_bytes(block) for block in range(self.blocks)]
        self.out = [moved / host.out_rate for moved in self.moved]
        self.back = [moved / host.back_rate for moved in self.moved]
        self.forward[0] += before.forward_seconds
        self.inputs[0] += before.input_grad_seconds
        self.whole[0] += before.input_grad_seconds + before.weight_grad_seconds
        self.saved[0] += before.saved_bytes
        self.boundary[0] += before.saved_bytes
        self.weight_seconds, self.full_bytes = stage.weight_grad_seconds, stage.saved_bytes
        self.forward_until, self.whole_until, self.moved_until = sums(self.forward), sums(self.whole), sums(self.moved)
        self.freed_until, self.replay_until, self.inputs_until = sums(self.freed), sums(self.replay), sums(self.inputs)
        self._peaks: dict[tuple[int, int], float] = {}
        self._needs: dict[tuple[int, int, bool], list[float]] = {}

    def held_bytes(self, away: int, dropped: int) -> float:
        """The bytes of a visit on the device when what goes has gone, and nothing is restored."""
        return self.full_bytes - self.moved_until[away] - self.freed_until[away + dropped] + self.freed_until[away]

    def need_bytes(self, block: int, away: int, dropped: int) -> float:
        """The bytes that the forward of a block takes."""
        return self.boundary[block] if away <= block < away + dropped else self.saved[block]

    def forward_bytes(self, away: int, dropped: int, leaving: float) -> float:
        """The most bytes that a forward adds, of which so many are on their way out when it ends."""
        if (away, dropped) not in self._peaks:
            level = peak = 0.0
            for block in range(self.blocks + 1):
                level += self.need_bytes(block, away, dropped)
                peak = max(peak, level)
                level -= self.moved[block] if block < away else 0.0
            self._peaks[away, dropped] = peak
        return max(self._peaks[away, dropped], self.held_bytes(away, dropped) + leaving)

    def late_bytes(self, away: int, late: int) -> float:
        """The bytes that a whole backward adds at least for its late blocks, which later ones have no room for."""
        return self.late_needs(away, late, False)[-1]

    def late_needs(self, away: int, late: int, split: bool) -> list[float]:
        """By piece, the bytes that a backward adds at least for its late blocks from this piece to the first one."""
        key = away, late, split
        if key not in self._needs:
            needs, need = [], 0.0
            for block in range(self.blocks + 1):
                need = max(0.0, need - (0.0 if split else self.saved[block]))
                need += self.freed[block] if away <= block < away + late else 0.0
                needs.append(need)
            self._needs[key] = needs
        return self._needs[key]


def sums(values: Sequence[float]) -> list[float]:
    """The sum of the values before each index, and of all."""
    return [0.0, *accumulate(values)]


_LONG = float("inf")


class Times(NamedTuple):
    """When a rank did what in a step, by place, in seconds."""

    starts: Sequence[float]
    arrived: Sequence[float]
    """When the message was there."""
    tail: Sequence[float]
    """From the end of the action to the end of the step, along the longest path."""


class Habits(NamedTuple):
    """How a rank decides. Seconds are in forwards of its blocks."""

    early: float = 2.0
    """Issue copies back so much before their latest start."""
    overdue: float = 1.0
    """Drop blocks for a copy back that would start so late."""
    flying: float = 1.0
    """Expect this share of what is on its way out when a forward ends. For less, the rank waits later."""
    drops: bool = True
    """Whether blocks are dropped at all."""
    pending: int = 1 << 30
    """Have so many weight gradients wait; below 0, split no backward."""


class Gene(NamedTuple):
    """The choices of one rank. By visit, the blocks that go, and those that are recomputed at least."""

    away: Sequence[int]
    dropped: Sequence[int]
    habits: Habits
    times: Times
    """Of a step like the one to come."""
    until: float
    """When the step is to end. An action that ends more than ``times.tail`` seconds before that has time to wait."""
    has_budget: bool = True


def leaving(
    lane: Lane, works: Sequence[Work], away: Sequence[int], starts: Sequence[float], pace: int, limit: float = _LONG
) -> tuple[list[int], list[float]]:
    """How many blocks of each visit can go, and the bytes on their way out at the end of each forward. ``pace``: how
    much longer a copy takes: 2 if one engine copies both ways. ``limit``: the seconds that a copy may wait for its
    engine."""
    chosen, flying, free = list(away), [0.0] * len(starts), 0.0
    queue: deque[tuple[float, float]] = deque()
    for place, (kind, visit) in enumerate(zip(lane.kinds, lane.visit_at)):
        if kind is not FORWARD:
            continue
        work, start = works[visit], starts[place]
        for block in range(away[visit]):
            made = start + work.forward_until[block + 1]
            if free > made + limit:
                chosen[visit] = block
                break
            free = (free if free > made else made) + pace * work.out[block]
            queue.append((free, work.moved[block]))
        end = start + work.forward_until[-1]
        while queue and queue[0][0] <= end:
            queue.popleft()
        flying[place] = sum([moved for _, moved in queue])
    return chosen, flying


def returning(
    lane: Lane, works: Sequence[Work], away: Sequence[int], starts: Sequence[float], pace: int, splits: bool,
    limit: float = _LONG,
) -> tuple[list[int], list[float]]:
    """How many blocks of each visit can come back no earlier than ``limit`` before their use, and the latest start of
    each copy back, in the order of uses."""
    chosen, latest, last = list(away), [], _LONG
    for visit in reversed(range(len(away))):
        work, place = works[visit], lane.backward_place[visit]
        until = work.inputs_until if splits and lane.kinds[place] is INPUT_GRAD else work.whole_until
        for block in range(away[visit]):
            use = starts[place] + until[-1] - until[block + 1]
            if use - last > limit:
                chosen[visit] = block
                break
            last = (use if use < last else last) - pace * work.back[block]
            latest.append(last)
    return chosen, latest[::-1]


class Outlook:
    """What is to come on a rank."""

    def __init__(self, lane: Lane, works: Sequence[Work], gene: Gene, pace: int) -> None:
        away, dropped, starts, habits = gene.away, gene.dropped, gene.times.starts, gene.habits
        self.uses = [(visit, block) for visit in range(len(away)) for block in reversed(range(away[visit]))]
        """Each copy back, in the order of uses."""
        self.latest = returning(lane, works, away, starts, pace, habits.pending >= 0)[1]
        """When each of them has to start."""
        self.flying = [habits.flying * moved for moved in leaving(lane, works, away, starts, pace)[1]]
        """By place, bytes on their way out when a forward ends."""
        self.due: list[int] = []
        """By place, how many of them have to have started when the action ends, or a backward begins."""
        self.levels: list[float] = []
        """By place, the most bytes of a forward, or those at the start of a backward and for its late blocks, with the
        copies back that are due."""
        self.work_until: list[float] = []
        """By place, the seconds of all actions before."""
        moved_until = sums([works[visit].moved[block] for visit, block in self.uses])
        places = [lane.backward_place[visit] for visit, _ in self.uses]
        alive = seconds = 0.0
        due = used = 0
        for place, (kind, visit) in enumerate(zip(lane.kinds, lane.visit_at)):
            work, gone, drops, end = works[visit], away[visit], dropped[visit], starts[place]
            self.work_until.append(seconds)
            if kind is FORWARD:
                level = alive + work.forward_bytes(gone, drops, self.flying[place])
                alive += work.held_bytes(gone, drops)
                seconds += work.forward_until[-1]
                end += work.forward_until[-1]
            else:
                level = alive + work.late_bytes(gone, drops)
                alive -= work.held_bytes(gone, drops)
                seconds += work.whole_until[-1] + work.replay_until[gone + drops] - work.replay_until[gone]
            while due < len(places) and self.latest[due] < end:
                due += 1
            while used < len(places) and places[used] < place + (kind is FORWARD):
                used += 1
            self.due.append(due)
            self.levels.append(level + (moved_until[due] - moved_until[used] if due > used else 0.0))
