"""Rank: simulates one rank and its copy engines, and decides as it goes what to release, fetch, drop and replay.

A rank runs its forwards and backwards in their order, and knows when the message for the next one arrives. Where it
would idle, it recomputes blocks of its next backwards, or runs weight gradients that wait, if that ends before the
message is there; a recompute waits for copies out if it needs their room. A copy back is issued at the first boundary
at which its engine would be free before the next one, if it is near its latest start and there is room up to its use;
where room comes of a release, behind that.
Where a block finds no room, the rank waits for copies out if it has the time. Else a kept block of the visit that is
used last is dropped after all, as if it had never been kept; so is one if a copy back that is overdue finds no room.
Bytes are those of :mod:`~torchckpt.planning.step.boundary`.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torchckpt.planning.order.schedule import Kind
from torchckpt.planning.plan.away.outlook import Gene, Outlook, Work
from torchckpt.planning.plan.search.lane import BACKWARD, FORWARD, INPUT_GRAD, RECOMPUTE, WEIGHT_GRAD, Lane
from torchckpt.planning.work.host import Host

__all__ = ["Rank", "Unfit"]

_LOOK = 4
"""A rank looks at so many visits with dropped blocks for an early recompute."""
_LONG = float("inf")
_NOW = -1
_ROUNDING = 1e-9


class Unfit(Exception):
    """There is no room for a block, or the step takes longer than it may."""


class Rank:
    """One rank in one step. A call runs its next action, which may start at ``start``, and returns when that ends."""

    def __init__(
        self, lane: Lane, works: Sequence[Work], host: Host, gene: Gene, outlook: Outlook, limit: float = _LONG
    ) -> None:
        """``limit``: raise Unfit if the step takes longer."""
        self.lane, self.works, self.host, self.gene, self.limit = lane, works, host, gene, limit
        self.away, self.dropped, self.early = gene.away, list(gene.dropped), [0] * len(gene.away)
        self.budget = lane.budget_bytes if gene.has_budget else _LONG
        self.outlook, self.levels = outlook, list(outlook.levels)
        self.order: list[tuple[Kind, int, int]] = []
        """Each action: its kind, its visit, how many blocks it recomputes early."""
        self.released: list[tuple[int, int, int, int]] = []
        """Visit and block of what is away, and the boundary of its release: action, block."""
        self.issued: list[tuple[int, int, int, int, int]] = []
        """The same of its issue, and how many of the releases there come before it."""
        self.starts: list[float] = []
        self.filled: list[float] = []
        """By place, the seconds of what else ran right before."""
        self.place = self.next_use = self.pieces = 0
        self.last_made = -1
        self.clock = self.message = self.bytes = self.drag = 0.0
        self.free = [0.0, 0.0]
        """When the engines are free, out and back."""
        self.leaving: deque[tuple[float, float, int, int]] = deque()
        """Of each copy out that holds memory: end, bytes, visit, block."""
        self.gone: dict[tuple[int, int], float] = {}
        self.back: dict[tuple[int, int], float] = {}
        self.pending: deque[int] = deque()
        self.left_seconds = lane.plain_seconds
        self.quiet = 0.0
        """Up to then it is too early for the next copy back, while :attr:`message` is the same."""
        self.unit = works[0].forward_until[-1] / max(1, works[0].blocks) if works else 0.0

    def __call__(self, start: float) -> float:
        visit, kind, begun = self.lane.visit_at[self.place], self.lane.kinds[self.place], self.clock
        self.message, self.quiet = start, 0.0
        if start > begun or self.pending:
            self._fill(kind, visit)
        split = kind is INPUT_GRAD and self._splits(visit)
        self.message, self.quiet = max(start, self.clock), 0.0
        self.filled.append(self.clock - begun)
        self.starts.append(self.message)
        if kind is FORWARD:
            self._forward(visit)
        else:
            self._backward(visit, split)
        self.place += 1
        self.pieces += self.works[visit].blocks + 1
        if self.clock + self.left_seconds > self.limit:
            raise Unfit
        return self.clock

    def finish(self) -> float:
        """Run what is left after the last action. Returns when the rank is done."""
        while self.pending:
            self._weight()
        return self.clock

    def _forward(self, visit: int) -> None:
        work, away, leaving = self.works[visit], self.away[visit], self.leaving
        self.last_made = max(self.last_made, visit)
        due = self.message
        for block in range(work.blocks + 1):
            need = work.need_bytes(block, away, self.dropped[visit])
            end = due + work.forward[block]
            if self.free[1] < end >= self.quiet:
                need = self._issue(block, need, end)
            if leaving and leaving[0][0] <= due:
                need = self._let_go(block, need, end, due)
            if self.bytes + need > self.budget:
                need = self._room(visit, block, need, work.forward_until[-1] - work.forward_until[block])
            self.bytes += need
            due = self.clock = max(due, self.clock) + work.forward[block] + self.drag
            self.drag = 0.0
            if block < away:
                gone = self.gone[visit, block] = self._copy(0, self.clock, work.out[block])
                leaving.append((gone, work.moved[block], visit, block))
        self.order.append((FORWARD, visit, 0))
        self.left_seconds -= work.forward_until[-1]

    def _backward(self, visit: int, split: bool) -> None:
        work, away, leaving, back = self.works[visit], self.away[visit], self.leaving, self.back
        late = away + self.dropped[visit] - self.early[visit]
        due, needs = self.message, work.late_needs(away, late - away, split)
        for block in range(work.blocks, -1, -1):
            seconds = work.inputs[block] if split else work.whole[block]
            need, frees, awaited = 0.0, 0.0 if split else work.saved[block], due
            if block < away:
                if (visit, block) not in back:
                    self._fetch(visit, block, work.whole_until[block + 1])
                awaited = max(due, back[visit, block])
            elif block < late:
                need, seconds = work.freed[block], seconds + work.replay[block]
            end = awaited + seconds
            if self.free[1] < end >= self.quiet:
                self._issue(block, needs[block], end)
            if leaving and leaving[0][0] <= awaited:
                self._let_go(block, needs[block], end, awaited)
            if need and self.bytes + need > self.budget:
                self._room(visit, block, need, work.whole_until[block + 1])
            self.bytes += need - frees
            due = self.clock = max(awaited, self.clock) + seconds + self.drag
            self.drag = 0.0
        self.order.append((INPUT_GRAD if split else BACKWARD, visit, 0))
        self.left_seconds -= work.whole_until[-1]
        if split:
            self.left_seconds += work.weight_seconds
            self.pending.append(visit)

    def _take(self, visit: int, block: int, at: int) -> None:
        """Issue the copy back of a block at boundary ``at`` of the next action."""
        work = self.works[visit]
        self.back[visit, block] = self._copy(1, max(self.clock, self.gone[visit, block]), work.back[block])
        self.bytes += work.moved[block]
        self.quiet = 0.0
        here = len(self.order), at
        behind = next((n for n, each in enumerate(reversed(self.released)) if each[2:] != here), len(self.released))
        self.issued.append((visit, block, *here, behind))

    def _copy(self, engine: int, start: float, seconds: float) -> float:
        end = max(self.free[engine], start) + seconds
        self.free[engine] = end
        if self.host.half_duplex:
            self.free = [end, end]
        self.drag += self.host.drag * seconds
        return end

    def _release(self, at: int) -> None:
        _, moved, visit, block = self.leaving.popleft()
        self.bytes -= moved
        if moved:  # what takes no bytes is kept in the plan, so nothing comes behind it
            self.released.append((visit, block, len(self.order), at))

    def _let_go(self, at: int, need: float, end: float, due: float) -> float:
        """Release what has left by ``due``; behind each release, :meth:`_issue`."""
        while self.leaving and self.leaving[0][0] <= due:
            self.clock = max(self.clock, self.leaving[0][0])
            self._release(at)
            if self.free[1] < end >= self.quiet:
                need = self._issue(at, need, end)
        return need

    def _issue(self, at: int, need: float, end: float) -> float:
        """Issue copies back until their engine is busy up to ``end``, when the next piece ends, which takes ``need``
        bytes. Returns what it takes then: blocks may have been dropped."""
        outlook, habits, lane, unit = self.outlook, self.gene.habits, self.lane, self.unit
        while self.free[1] < end and len(self.issued) < len(outlook.uses):
            visit, block = outlook.uses[len(self.issued)]
            gone = self.gone.get((visit, block), _LONG)
            if gone > self.clock or (self.leaving and self.leaving[0][0] <= gone):
                break
            use, ahead = lane.backward_place[visit], -_LONG
            if use > self.place:
                begin = self.message + outlook.work_until[use] - outlook.work_until[self.place]
                lag = max(0.0, begin - self.gene.times.starts[use])
                latest = outlook.latest[len(self.issued)] + lag
                ahead, self.quiet = latest - max(end, self.free[1]), latest - habits.early * unit
            if ahead > habits.early * unit:
                break
            moved = self.works[visit].moved[block]
            full = self._full(moved, use, need)
            if full is None:
                for place in range(self.place + (lane.kinds[self.place] is not FORWARD), use + (use > self.place)):
                    self.levels[place] += moved if outlook.due[place] <= len(self.issued) else 0.0
                self._take(visit, block, at)
            elif ahead <= -habits.overdue * unit and full < use and self._drop(at, full):
                if lane.kinds[self.place] is FORWARD and len(self.starts) > self.place:  # which has begun
                    current = lane.visit_at[self.place]
                    need = self.works[current].need_bytes(at, self.away[current], self.dropped[current])
            else:
                break
        return need

    def _full(self, moved: float, use: int, need: float) -> int | None:
        """The first place up to ``use`` that has no room for the next copy back, or ``_NOW``; None if all have."""
        if self.bytes + need + moved > self.budget:
            return _NOW
        issued, due = len(self.issued), self.outlook.due
        for place in range(self.place + (self.lane.kinds[self.place] is not FORWARD), use + (use > self.place)):
            if self.levels[place] + (moved if due[place] <= issued else 0.0) > self.budget:
                return place
        return None

    def _room(self, visit: int, block: int, need: float, ahead: float) -> float:
        """Make room before a block, from which on its action takes ``ahead`` seconds. Returns what the block needs."""
        while self.bytes + need > self.budget:
            stall = self.leaving[0][0] - self.clock if self.leaving else _LONG
            slack = self.gene.until - self.gene.times.tail[self.place] - self.clock - ahead
            if stall > max(0.0, slack) and self._drop(block):
                if self.lane.kinds[self.place] is FORWARD:
                    need = self.works[visit].need_bytes(block, self.away[visit], self.dropped[visit])
            elif self.leaving:
                self.clock = max(self.clock, self.leaving[0][0])
                self._release(block)
            else:
                raise Unfit
        return need

    def _fetch(self, visit: int, block: int, ahead: float) -> None:
        """Bring back the block whose backward is next, as :meth:`_room` makes room."""
        self._let_go(block, 0.0, -_LONG, self.gone[visit, block])  # and issue nothing behind it
        self._room(visit, block, self.works[visit].moved[block], ahead)
        self._take(visit, block, block)

    def _drop(self, at: int, place: int = _NOW) -> bool:
        """Drop a kept block of what is used last, to have room before piece ``at``, or at a later place."""
        lane, here, levels = self.lane, self.place, self.levels
        when, last = max(place, here), self.last_made
        while place > here and last + 1 < len(self.away) and lane.forward_place[last + 1] <= when:
            last += 1
        for visit in range(last if self.gene.habits.drops else -1, -1, -1):
            made, use = lane.forward_place[visit], lane.backward_place[visit]
            if use <= when and made <= when:
                break
            work, away, dropped = self.works[visit], self.away[visit], self.dropped[visit]
            block, freed = away + dropped, work.freed[min(away + dropped, work.blocks)]
            is_made = made < here or (made == here and block < at)
            if made > when or not freed or self.early[visit] or (place == _NOW and not is_made and block > at):
                continue
            more = work.late_bytes(away, dropped + 1) - work.late_bytes(away, dropped) - freed
            if levels[use] + more > self.budget:
                continue
            self.dropped[visit] += 1
            self.bytes -= freed if is_made else 0.0
            if made >= here:
                flying = self.outlook.flying[made]
                levels[made] += work.forward_bytes(away, dropped + 1, flying)
                levels[made] -= work.forward_bytes(away, dropped, flying)
            for other in range(max(here, made + (made >= here)), use):
                levels[other] -= freed
            levels[use] += more
            return True
        return False

    def _splits(self, visit: int) -> bool:
        """Whether there is room for all of a visit up to its weight gradients. Runs some of others for that."""
        work, away, habits = self.works[visit], self.away[visit], self.gene.habits
        missing = work.freed_until[away + self.dropped[visit] - self.early[visit]] - work.freed_until[away]
        missing += sum(work.moved[block] for block in range(away) if (visit, block) not in self.back)
        while habits.pending >= 0 and self.pending and self.bytes + missing > self.budget:
            self._weight()
        missing -= sum([moved for _, moved, _, _ in self.leaving])
        return habits.pending >= 0 and self.bytes + missing <= self.budget

    def _fill(self, kind: Kind, visit: int) -> None:
        """Do what can be done before the message arrives, and what has to be done to have room."""
        while True:
            idle = self.message - self.clock
            if idle > 0.0 and self._recompute():
                continue
            if not self.pending:
                return
            ready = idle > 0.0 and idle * (1 + _ROUNDING) >= self.works[self.pending[0]].weight_seconds
            if not (ready or len(self.pending) > self.gene.habits.pending or self._is_short(kind, visit)):
                return
            self._weight()

    def _is_short(self, kind: Kind, visit: int) -> bool:
        """Whether there is no room for the next action, if it is no split backward, beside what waits."""
        work, away, dropped = self.works[visit], self.away[visit], self.dropped[visit]
        need = work.late_bytes(away, dropped - self.early[visit])
        if kind is FORWARD:
            need = work.held_bytes(away, dropped) + (work.moved[0] if away else 0.0)
        return kind is not INPUT_GRAD and self.bytes + need > self.budget

    def _weight(self) -> None:
        visit = self.pending.popleft()
        work = self.works[visit]
        self._run(WEIGHT_GRAD, visit, 0, self.clock, work.weight_seconds, 0.0)
        self.bytes -= work.full_bytes
        self.left_seconds -= work.weight_seconds

    def _run(self, kind: Kind, visit: int, early: int, start: float, seconds: float, need: float) -> None:
        """Run a recompute or weight gradients, for which there is room at ``start``."""
        end = start + seconds
        if self.free[1] < end >= self.quiet:
            self._issue(0, need, end)
        self._let_go(0, need, end, start)
        self.order.append((kind, visit, early))
        self.bytes += need
        self.clock = end + self.drag
        self.drag = 0.0

    def _recompute(self) -> bool:
        """Replay the dropped blocks of one of the next visits, as many as there is time and room for. Where there is no
        room, wait for copies out."""
        lane, place, visits = self.lane, self.place, []
        while self.next_use < len(self.away) and lane.backward_place[self.next_use] < place:
            self.next_use += 1
        for visit in range(self.next_use, self.last_made + 1):
            if self.dropped[visit] and not self.early[visit] and lane.forward_place[visit] < place:
                visits.append(visit)
                if len(visits) == _LOOK:
                    break
        start, freed = self.clock, 0.0
        copies = iter(self.leaving)
        while start < self.message and visits:
            if any(self._recompute_visit(visit, start, freed) for visit in visits):
                return True
            end, moved, _, _ = next(copies, (_LONG, 0.0, 0, 0))
            start, freed = max(self.clock, end), freed + moved
        return False

    def _recompute_visit(self, visit: int, start: float, freed: float) -> bool:
        """The same of one visit, at ``start``, when so many bytes are free that leave now."""
        idle = self.message - start
        work, first, use = self.works[visit], self.away[visit], self.lane.backward_place[visit]
        last, levels = first + self.dropped[visit], self.levels
        high = max([self.bytes - freed, *levels[self.place : use]])
        for block in range(first, last):
            seconds = work.replay_until[last] - work.replay_until[block]
            need = work.freed_until[last] - work.freed_until[block]
            more = need + work.late_bytes(first, block - first) - work.late_bytes(first, last - first)
            if seconds > idle * (1 + _ROUNDING) or not need or max(high + need, levels[use] + more) > self.budget:
                continue
            self.early[visit] = last - block
            self._run(RECOMPUTE, visit, last - block, start, seconds, need)
            for place in range(self.place, use):
                levels[place] += need
            levels[use] += more
            return True
        return False
