"""Lane: the forwards and backwards of one rank in their order, and what is kept of its visits under a byte budget.

What is kept is decided by bytes alone, rank by rank: a kept block occupies its bytes from the forward to the backward.
Where the budget is exceeded, something that is alive has to be dropped; to drop what is used last is best (Belady
1966), for equal blocks even optimal. Weight gradients have no place here: they are moved, and :mod:`dispatch` places
them.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from torchckpt.model.plan.stage.holding import DROP_ORDERS, Holding, Holdings
from torchckpt.model.schedule.action import Kind
from torchckpt.model.schedule.orders import Visit
from torchckpt.model.schedule.schedule import Schedule

__all__ = ["BACKWARD", "CHOICES", "FORWARD", "Lane", "Reserve", "lanes_of"]

FORWARD, BACKWARD, INPUT_GRAD = range(3)
_KINDS = {Kind.FORWARD: FORWARD, Kind.BACKWARD: BACKWARD, Kind.INPUT_GRAD: INPUT_GRAD}

CHOICES = ("last", "even", "cheap")
"""Which block to drop next: one of the visit that is used last (``last``), one of the visit that keeps most (``even``),
or the block of any visit with the fewest recompute seconds per byte (``cheap``)."""

_ROUNDING = 1e-11
"""Of a budget: what sums of numbers may be off. Less than a byte of 60 GB."""


@dataclass(frozen=True)
class Reserve:
    """How to choose the kept blocks, and how much memory to reserve. One entry per visit, in the order of backwards."""

    early: tuple[int, ...]
    """Blocks that shall be there when the backward starts, kept or early."""
    wait: tuple[int, ...]
    """Actions of the rank that a weight gradient shall be able to wait for."""
    order: tuple[str, ...]
    """One of ``DROP_ORDERS``."""
    drops: tuple[int, ...]
    """Blocks that are dropped in any case."""
    choice: str = "last"


class Lane:
    """Visits are numbered in the order of their backwards; places are those of ``kinds``."""

    def __init__(self, rank: int, schedule: Schedule, holdings: Sequence[Holdings], budget_bytes: float) -> None:
        order = [action for action in schedule.ranks[rank] if action.kind in _KINDS]
        self.visits: list[Visit] = [(j, i) for j, kind, i in order if kind is not Kind.FORWARD]
        number = {visit: at for at, visit in enumerate(self.visits)}
        self.kinds = [_KINDS[kind] for _, kind, _ in order]
        self.visit_at = [number[j, i] for j, _, i in order]
        self.made, self.used = [0] * len(self.visits), [0] * len(self.visits)
        for place, (kind, visit) in enumerate(zip(self.kinds, self.visit_at)):
            (self.used if kind else self.made)[visit] = place
        self.is_split = [self.kinds[place] == INPUT_GRAD for place in self.used]
        self.holdings = [holdings[stage] for stage, _ in self.visits]
        self.plain_seconds = sum(own.forward_seconds + own.backward_seconds for own in self.holdings)
        self.budget_bytes = budget_bytes * (1 + _ROUNDING)
        """With room for rounding."""

    def __len__(self) -> int:
        return len(self.kinds)

    def all_kept(self) -> list[Holding]:
        return [own.without(()) for own in self.holdings]

    def all_dropped(self) -> list[Holding]:
        return [own.levels[DROP_ORDERS[0]][-1] for own in self.holdings]

    def profile(self, held: Sequence[Holding]) -> list[float]:
        """Bytes alive at each place, where whole backwards recompute everything that is dropped."""
        found, alive = [0.0] * len(self.kinds), 0.0
        for place, (kind, visit) in enumerate(zip(self.kinds, self.visit_at)):
            own = held[visit]
            if kind:
                found[place] = alive + own.use_bytes[0] - own.held_bytes
                alive -= own.held_bytes
            else:
                alive += own.held_bytes
                found[place] = alive
        return found

    def keep(self, reserve: Reserve) -> list[Holding] | None:
        """The holding of each visit; None if no choice fits the budget."""
        return _Sweep(self, reserve).run()

    def reserve(self, early: int, wait: int, order: str, choice: str) -> Reserve:
        """The same for every visit."""
        blocks = tuple(min(early, own.blocks) for own in self.holdings)
        waits = tuple(wait if split else 0 for split in self.is_split)
        visits = len(self.visits)
        return Reserve(blocks, waits, (order,) * visits, (0,) * visits, choice)


def lanes_of(schedule: Schedule, holdings: Sequence[Holdings], budget_bytes: Sequence[float]) -> list[Lane]:
    return [Lane(rank, schedule, holdings, budget) for rank, budget in enumerate(budget_bytes)]


class _Sweep:
    """Goes along the order, and where it does not fit, drops one block after the other."""

    def __init__(self, lane: Lane, reserve: Reserve) -> None:
        self.lane, self.reserve = lane, reserve
        pairs = list(zip(lane.holdings, reserve.order))
        self.levels = [own.levels[order] for own, order in pairs]
        self.densities = [own.densities[order] for own, order in pairs]
        self.level = list(reserve.drops)
        self.is_alive = bytearray(len(pairs))
        self.alive_bytes = 0.0
        self.pending: dict[int, float] = {}
        """Bytes of weight gradients that wait, by the place at which they have been done."""
        self.heap: list[tuple[float, int, int]] = []
        """Of what may be dropped: which is first, the visit (negative), its level then."""

    def run(self) -> list[Holding] | None:
        lane = self.lane
        for place, (kind, visit) in enumerate(zip(lane.kinds, lane.visit_at)):
            self.alive_bytes -= self.pending.pop(place, 0.0)
            if not (self._use(visit, place) if kind else self._make(visit)):
                return None
        return [levels[level] for levels, level in zip(self.levels, self.level)]

    def _make(self, visit: int) -> bool:
        self.alive_bytes += self.levels[visit][self.level[visit]].held_bytes
        self.is_alive[visit] = 1
        self._push(visit)
        while self.alive_bytes > self.lane.budget_bytes:
            if not (self._drop(-1) or self._let_go()):
                return False
        return True

    def _use(self, visit: int, place: int) -> bool:
        lane, reserve = self.lane, self.reserve
        wait = reserve.wait[visit]
        early = lane.holdings[visit].blocks if wait else reserve.early[visit]
        own = self.levels[visit][self.level[visit]]
        while self.alive_bytes + own.reserved_bytes(early) - own.held_bytes > lane.budget_bytes:
            if self._drop(visit):
                continue
            if early > own.kept:
                early = min(early, own.kept + len(own.dropped)) - 1
            elif self.level[visit] + 1 < len(self.levels[visit]):
                self._lower(visit)
                own = self.levels[visit][self.level[visit]]
            elif not self._let_go():
                return False
        self.is_alive[visit] = 0
        self.alive_bytes -= own.held_bytes
        if wait:
            full = lane.holdings[visit].full_bytes
            self.alive_bytes += full
            self.pending[place + wait + 1] = self.pending.get(place + wait + 1, 0.0) + full
        return True

    def _drop(self, but: int) -> bool:
        """One block of another visit than ``but``, if there is any."""
        heap, aside = self.heap, None
        while heap:
            entry = heappop(heap)
            visit = -entry[1]
            if not self.is_alive[visit] or entry[2] != self.level[visit]:
                continue
            if visit == but:
                aside = entry
                continue
            self._lower(visit)
            self._push(visit)
            break
        else:
            visit = -1
        if aside:
            heappush(heap, aside)
        return visit >= 0

    def _lower(self, visit: int) -> None:
        levels, level = self.levels[visit], self.level[visit]
        self.alive_bytes += levels[level + 1].held_bytes - levels[level].held_bytes
        self.level[visit] = level + 1

    def _push(self, visit: int) -> None:
        level = self.level[visit]
        if level + 1 == len(self.levels[visit]):
            return
        choice = self.reserve.choice
        first = float(-visit)
        if choice == "even":
            first = float(level + 1 - len(self.levels[visit]))
        elif choice == "cheap":
            first = self.densities[visit][level]
        heappush(self.heap, (first, -visit, level))

    def _let_go(self) -> bool:
        """The weight gradients that have waited longest are done earlier than they could be."""
        if not self.pending:
            return False
        self.alive_bytes -= self.pending.pop(min(self.pending))
        return True
