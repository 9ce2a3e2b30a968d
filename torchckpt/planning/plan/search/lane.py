"""Lane: the forwards and backwards of one rank in their order, and the blocks that it keeps under a byte budget.

Each rank decides by bytes alone: a kept block occupies its bytes from the forward to the backward. Where the budget is
exceeded, a block of a visit that is alive is dropped. A good choice is the visit whose backward comes last (Belady
1966); for equal blocks it is optimal. A lane has no weight gradients: :mod:`dispatch` decides when they run.

A dropped block is recomputed *early*, by an ``R`` action before the gradient arrives, or *late*, inside the backward.
The last of the dropped blocks are the early ones. A backward goes from the last block to the first, so it recomputes
the late ones in memory that later blocks have freed.

Bytes are those of :mod:`~torchckpt.planning.step.memory`, whose sums a :class:`Holding` has ready: a search counts some
hundred thousand places, and a step of its own for each try would take several times as long.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from torchckpt.planning.order.schedule import Kind, Schedule, Visit
from torchckpt.planning.step.memory import use_bytes
from torchckpt.planning.work.block import Block, Stage
from torchckpt.planning.work.choice import Choice

__all__ = [
    "BACKWARD", "CHOICES", "DROP_ORDERS", "FORWARD", "INPUT_GRAD", "RECOMPUTE", "WEIGHT_GRAD", "Holding", "Holdings",
    "Lane", "Reserve", "density",
]

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD, RECOMPUTE = Kind

CHOICES = ("last", "even", "cheap")
"""Which block to drop next: one of the visit whose backward comes last (``last``), one of the visit that keeps most
blocks (``even``), or the block of any visit with the fewest recompute seconds per byte (``cheap``)."""

_ROUNDING = 1e-11
"""The share of a budget that sums of bytes may exceed it by, due to rounding. Less than a byte of 60 GB."""


DROP_ORDERS = ("first", "cheap", "small", "large")
"""Which block of a stage is dropped first: the first one, the one with the fewest recompute seconds per byte, the one
that frees the fewest bytes, or the one that frees the most. If all blocks are equal, the orders are the same."""


class Holding:
    """The bytes and seconds of a visit for one choice of dropped blocks. Lists are indexed by how many are early."""

    __slots__ = ("dropped", "early_bytes", "early_seconds", "held_bytes", "kept", "late_seconds", "use_bytes")

    def __init__(self, stage: Stage, dropped: tuple[int, ...]) -> None:
        blocks = stage.blocks
        self.dropped = dropped
        self.kept = len(blocks) - len(dropped)
        self.held_bytes = stage.saved_bytes - sum(blocks[block].freed_bytes for block in dropped)
        """Bytes from the forward to the backward, without early blocks."""
        self.early_bytes: list[float] = []
        """Bytes that ``R`` adds."""
        self.early_seconds: list[float] = []
        self.late_seconds: list[float] = []
        self.use_bytes: list[float] = []
        """Bytes at the peak of a whole backward."""
        for early in range(len(dropped) + 1):
            late, back = dropped[: len(dropped) - early], dropped[len(dropped) - early :]
            self.early_bytes.append(sum(blocks[block].freed_bytes for block in back))
            self.early_seconds.append(sum(blocks[block].recompute_seconds for block in back))
            self.late_seconds.append(sum(blocks[block].recompute_seconds for block in late))
            self.use_bytes.append(use_bytes(stage, late))

    def choice(self, early: int) -> Choice:
        """The choice of which so many blocks are early."""
        late = len(self.dropped) - early
        kept = tuple(block for block in range(self.kept + len(self.dropped)) if block not in self.dropped)
        return Choice(kept, early=self.dropped[late:], late=self.dropped[:late])

    def reserved_bytes(self, blocks: int) -> float:
        """The peak bytes of the backward if ``blocks`` are in memory when it starts, kept or early."""
        return self.use_bytes[min(len(self.dropped), max(0, blocks - self.kept))]


class Holdings:
    """The holdings of one stage, each made when it is first asked for."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.blocks = len(stage.blocks)
        self.full_bytes = stage.saved_bytes
        self.forward_seconds = stage.forward_seconds
        self.input_grad_seconds = stage.input_grad_seconds
        self.weight_grad_seconds = stage.weight_grad_seconds
        self.backward_seconds = stage.input_grad_seconds + stage.weight_grad_seconds
        orders = _drop_orders(stage)
        self._by_dropped: dict[tuple[int, ...], Holding] = {}
        self.levels = {name: [self.without(order[:n]) for n in range(len(order) + 1)] for name, order in orders.items()}
        """The holding after each number of drops, by drop order."""
        self.droppable = len(orders[DROP_ORDERS[0]])
        """The number of blocks that free bytes if they are dropped."""
        self.densities = {name: [density(stage.blocks[place]) for place in order] for name, order in orders.items()}

    def without(self, dropped: Sequence[int]) -> Holding:
        key = tuple(sorted(dropped))
        if key not in self._by_dropped:
            self._by_dropped[key] = Holding(self.stage, key)
        return self._by_dropped[key]


def density(block: Block) -> float:
    """The recompute seconds that a byte of memory saves if the block is kept."""
    return block.recompute_seconds / block.freed_bytes if block.freed_bytes else float("inf")


def _drop_orders(stage: Stage) -> dict[str, tuple[int, ...]]:
    blocks = stage.blocks
    places = [place for place, block in enumerate(blocks) if block.freed_bytes]
    return {
        "first": tuple(places),
        "cheap": tuple(sorted(places, key=lambda place: density(blocks[place]))),
        "small": tuple(sorted(places, key=lambda place: blocks[place].freed_bytes)),
        "large": tuple(sorted(places, key=lambda place: -blocks[place].freed_bytes)),
    }


@dataclass(frozen=True)
class Reserve:
    """How to choose the kept blocks, and how much memory to reserve. One entry per visit, in the order of backwards."""

    early: tuple[int, ...]
    """How many blocks are to be in memory when the backward starts, kept or early."""
    wait: tuple[int, ...]
    """How many later actions of the rank a weight gradient may wait for."""
    order: tuple[str, ...]
    """One of ``DROP_ORDERS``."""
    drops: tuple[int, ...]
    """The blocks that are dropped even if they fit."""
    choice: str = "last"
    """One of ``CHOICES``."""


class Lane:
    """One rank. Visits are numbered in the order of their backwards; a place is an index of ``kinds``."""

    def __init__(self, rank: int, schedule: Schedule, holdings: Sequence[Holdings], budget_bytes: float) -> None:
        order = [action for action in schedule.ranks[rank] if action.kind is not Kind.WEIGHT_GRAD]
        self.visits: list[Visit] = [(j, i) for j, kind, i in order if kind is not Kind.FORWARD]
        number = {visit: index for index, visit in enumerate(self.visits)}
        self.kinds = [kind for _, kind, _ in order]
        self.visit_at = [number[j, i] for j, _, i in order]
        self.forward_place, self.backward_place = [0] * len(self.visits), [0] * len(self.visits)
        for place, (kind, visit) in enumerate(zip(self.kinds, self.visit_at)):
            (self.forward_place if kind is FORWARD else self.backward_place)[visit] = place
        self.is_split = [self.kinds[place] is INPUT_GRAD for place in self.backward_place]
        self.holdings = [holdings[stage] for stage, _ in self.visits]
        self.plain_seconds = sum(stage.forward_seconds + stage.backward_seconds for stage in self.holdings)
        self.budget_bytes = budget_bytes * (1 + _ROUNDING)
        """The budget, with room for rounding."""

    def __len__(self) -> int:
        return len(self.kinds)

    def all_kept(self) -> list[Holding]:
        return [holdings.without(()) for holdings in self.holdings]

    def all_dropped(self) -> list[Holding]:
        return [holdings.levels[DROP_ORDERS[0]][-1] for holdings in self.holdings]

    def profile(self, chosen: Sequence[Holding]) -> list[float]:
        """Bytes alive at each place if backwards are whole and recompute all dropped blocks."""
        profile, alive = [0.0] * len(self.kinds), 0.0
        for place, (kind, visit) in enumerate(zip(self.kinds, self.visit_at)):
            holding = chosen[visit]
            if kind is FORWARD:
                alive += holding.held_bytes
                profile[place] = alive
            else:
                profile[place] = alive + holding.use_bytes[0] - holding.held_bytes
                alive -= holding.held_bytes
        return profile

    def keep(self, reserve: Reserve) -> list[Holding]:
        """The holding of each visit. The budget is large enough to drop all blocks, as that of a search is."""
        return _Sweep(self, reserve).run()

    def reserve(self, early: int, wait: int, order: str, choice: str) -> Reserve:
        """A reserve that is the same for every visit."""
        blocks = tuple(min(early, holdings.blocks) for holdings in self.holdings)
        waits = tuple(wait if split else 0 for split in self.is_split)
        visits = len(self.visits)
        return Reserve(blocks, waits, (order,) * visits, (0,) * visits, choice)


class _Sweep:
    """Goes through the order of a lane, and drops blocks, one at a time, where an action exceeds the budget."""

    def __init__(self, lane: Lane, reserve: Reserve) -> None:
        self.lane, self.reserve = lane, reserve
        pairs = list(zip(lane.holdings, reserve.order))
        self.levels = [holdings.levels[order] for holdings, order in pairs]
        self.densities = [holdings.densities[order] for holdings, order in pairs]
        self.level = list(reserve.drops)
        self.is_alive = bytearray(len(pairs))
        self.alive_bytes = 0.0
        self.pending: dict[int, float] = {}
        """Bytes of pending weight gradients, by the place before which they run at the latest."""
        self.heap: list[tuple[float, int, int]] = []
        """The visits that may drop a block: a sort key, the negative visit, and its level when it was pushed."""

    def run(self) -> list[Holding]:
        for place, (kind, visit) in enumerate(zip(self.lane.kinds, self.lane.visit_at)):
            self.alive_bytes -= self.pending.pop(place, 0.0)
            if kind is FORWARD:
                self._forward(visit)
            else:
                self._backward(visit, place)
        return [levels[level] for levels, level in zip(self.levels, self.level)]

    def _forward(self, visit: int) -> None:
        self.alive_bytes += self.levels[visit][self.level[visit]].held_bytes
        self.is_alive[visit] = 1
        self._push(visit)
        while self.alive_bytes > self.lane.budget_bytes and (self._drop(-1) or self._run_pending()):
            pass

    def _backward(self, visit: int, place: int) -> None:
        lane, reserve = self.lane, self.reserve
        wait = reserve.wait[visit]
        early = lane.holdings[visit].blocks if wait else reserve.early[visit]
        holding = self.levels[visit][self.level[visit]]
        while self.alive_bytes + holding.reserved_bytes(early) - holding.held_bytes > lane.budget_bytes:
            if self._drop(visit):
                continue
            if early > holding.kept:
                early = min(early, holding.kept + len(holding.dropped)) - 1
            elif self.level[visit] + 1 < len(self.levels[visit]):
                self._lower(visit)
                holding = self.levels[visit][self.level[visit]]
            elif not self._run_pending():
                break
        self.is_alive[visit] = 0
        self.alive_bytes -= holding.held_bytes
        if wait:
            full = lane.holdings[visit].full_bytes
            self.alive_bytes += full
            self.pending[place + wait + 1] = self.pending.get(place + wait + 1, 0.0) + full

    def _drop(self, but: int) -> bool:
        """Drop one block of a visit other than ``but``; False if there is none."""
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

    def _run_pending(self) -> bool:
        """Run the weight gradients that have waited longest now; False if none wait."""
        if not self.pending:
            return False
        self.alive_bytes -= self.pending.pop(min(self.pending))
        return True
