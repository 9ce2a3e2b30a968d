"""Dispatch: simulate one step in which each rank decides what to run next, for given choices of kept blocks.

Forwards and backwards run in the order of the schedule. A rank that would idle recomputes blocks of its next backwards,
if the budget has room for them until then, or runs a pending weight gradient. If its next forward or backward does not
fit, it runs pending weight gradients first. A split backward that still does not fit runs as a whole one.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torchckpt.planning.order.program import Program, run_deciding
from torchckpt.planning.order.schedule import Kind
from torchckpt.planning.plan.search.lane import BACKWARD, FORWARD, INPUT_GRAD, RECOMPUTE, WEIGHT_GRAD, Holding, Lane

__all__ = ["Done", "SimulatedStep", "Strategy", "dispatch"]

_LOOK = 4
"""A rank looks at so many visits with dropped blocks for an early recompute."""
_NEVER = -1.0
_LONG = float("inf")


@dataclass(frozen=True)
class Strategy:
    """How a rank decides what to do when it would idle."""

    all_at_once: bool = False
    """Start a recompute only when there is room for all of the visit's blocks that can be early."""
    next_only: bool = False
    """Recompute only what the very next backward uses."""
    patience: float = 0.0
    """Start work only if at least this share of it is done when the next message arrives."""
    memory_share: float = _LONG
    """Have weight gradients wait only while the rank holds less than this share of what keeping all blocks takes."""


Done: TypeAlias = tuple[Kind, int, int, float, int]
"""One action of a rank: its kind, its visit, how many blocks are early, its end, the token that it waited for."""
Next: TypeAlias = tuple[Kind, int, int]
"""The next action: its kind, its visit, how many blocks are early."""


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step, with all decisions of its ranks."""

    step_seconds: float
    done: list[list[Done]]
    """The actions of each rank."""
    arrived: list[float]
    """When each token arrived; negative if it was not sent."""
    sender: dict[int, tuple[int, int]]
    """The rank that sent each token, and the place of the sending action in ``done``."""

    @property
    def is_complete(self) -> bool:
        """Whether it was simulated to its end, within its limit."""
        return self.step_seconds < _LONG

    @property
    def sort_key(self) -> tuple[float, float]:
        """A key to compare steps, smaller is better: the seconds of the step, then how early messages arrive."""
        return self.step_seconds, sum(self.arrived)

    def critical(self) -> list[tuple[int, int]]:
        """Rank and visit of each action on one critical path, from the end of the step to its start."""
        ends = [done[-1][3] if done else _NEVER for done in self.done]
        rank = max(range(len(ends)), key=ends.__getitem__)
        place, path = len(self.done[rank]) - 1, []
        while place >= 0:
            _, visit, _, _, awaited = self.done[rank][place]
            path.append((rank, visit))
            rank, place = self.sender.get(awaited, (rank, place - 1))
        return path


def dispatch(
    program: Program, lanes: Sequence[Lane], chosen: Sequence[Sequence[Holding]], strategy: Strategy,
    expected: Sequence[float], limit_seconds: float
) -> SimulatedStep:
    """Simulate one step, with the ``chosen`` holding of each rank and visit. ``program`` has no weight gradients. A
    patient rank waits for messages up to when they are ``expected``; empty: not known. If the step takes longer than
    ``limit_seconds``, the simulation stops, and its seconds are infinite."""
    ranks = [_Rank(lane, of_rank, strategy) for lane, of_rank in zip(lanes, chosen)]
    messages = run_deciding(program, ranks, expected, limit_seconds)
    done = [rank.done for rank in ranks]
    if messages is None:
        return SimulatedStep(_LONG, done, [], {})
    return SimulatedStep(max((of_rank[-1][3] for of_rank in done if of_rank), default=0.0), done, *messages)


class _Rank:
    """The state of one rank, and its next decision."""

    def __init__(self, lane: Lane, chosen: Sequence[Holding], strategy: Strategy) -> None:
        self.lane, self.chosen = lane, chosen
        self.all_at_once, self.next_only = strategy.all_at_once, strategy.next_only
        self.patience = strategy.patience
        self.budget_bytes = lane.budget_bytes
        if strategy.memory_share < _LONG:
            most = max(lane.profile(lane.all_kept()), default=0.0)
            self.budget_bytes = min(self.budget_bytes, strategy.memory_share * most)
        self.profile = lane.profile(chosen)
        """Bytes at each place, with the early blocks that were recomputed, without pending weight gradients."""
        self.place = 0
        self.alive_bytes = 0.0
        self.early = [0] * len(chosen)
        self.waiting: list[int] = []
        """Visits whose weight gradients are still pending."""
        self.next_use = 0
        self.done: list[Done] = []
        self.left_seconds = lane.plain_seconds + sum(holding.late_seconds[0] for holding in chosen)

    def next_in_order(self) -> Next:
        """The next action of the order, or a weight gradient that makes room for it: kind, visit, early blocks."""
        lane, waiting = self.lane, self.waiting
        visit, kind = lane.visit_at[self.place], lane.kinds[self.place]
        holding, early = self.chosen[visit], self.early[visit]
        if kind is FORWARD:
            adds = holding.held_bytes
        elif kind is BACKWARD:
            adds = holding.use_bytes[early] - holding.held_bytes - holding.early_bytes[early]
        else:
            adds = lane.holdings[visit].full_bytes - holding.held_bytes - holding.early_bytes[early]
        if self.alive_bytes + adds > self.budget_bytes:
            if waiting:
                return WEIGHT_GRAD, waiting[0], 0
            if kind is INPUT_GRAD:
                kind = BACKWARD
        return kind, visit, early

    def while_idle(self, idle_seconds: float) -> Next | None:
        """What to do if the next action of the order cannot start for at least ``idle_seconds``; None to wait."""
        recompute = self._recompute()
        if recompute:
            _, visit, early = recompute
            if idle_seconds >= self.patience * self.chosen[visit].early_seconds[early]:
                return recompute
        if self.waiting:
            visit = self.waiting[0]
            if idle_seconds >= self.patience * self.lane.holdings[visit].weight_grad_seconds:
                return WEIGHT_GRAD, visit, 0
        return None

    def _recompute(self) -> Next | None:
        """The early recompute to start now, of the next visit that has one; None if there is none, or if it waits."""
        lane, chosen, begun = self.lane, self.chosen, self.early
        backward, forward, place, visits = lane.backward_place, lane.forward_place, self.place, len(chosen)
        visit = self.next_use
        while visit < visits and (backward[visit] < place or begun[visit] or not chosen[visit].dropped):
            visit += 1
        self.next_use, looked = visit, 0
        while visit < visits and looked < _LOOK and forward[visit] < place:
            if self.next_only and backward[visit] != place:
                return None
            if chosen[visit].dropped and not begun[visit]:
                looked += 1
                early, later = self._room(visit)
                if later > early and (self.waiting or self.all_at_once):
                    return None
                if early:
                    return RECOMPUTE, visit, early
            visit += 1
        return None

    def _room(self, visit: int) -> tuple[int, int]:
        """The number of blocks that can be early now, and later, when weight gradients are done or at the backward."""
        holding, place, use, budget = self.chosen[visit], self.place, self.lane.backward_place[visit], self.budget_bytes
        high = max(self.profile[place:use]) if use > place else 0.0
        now = budget - (high if high > self.alive_bytes else self.alive_bytes)
        later = _LONG if self.all_at_once else budget - high
        at_use = budget - self.profile[use] + holding.use_bytes[0]
        use_bytes, early_bytes, most = holding.use_bytes, holding.early_bytes, 0
        for count in range(len(use_bytes) - 1, 0, -1):
            if use_bytes[count] <= at_use and early_bytes[count] <= later:
                most = most or count
                if early_bytes[count] <= now:
                    return count, most
        return 0, most

    def run(self, decision: Next, now: float, awaited: int) -> float:
        kind, visit, early = decision
        seconds = self._start(kind, visit, early)
        self.left_seconds -= seconds
        end = now + seconds
        self.done.append((kind, visit, early, end, awaited))
        return end

    def _start(self, kind: Kind, visit: int, early: int) -> float:
        """Count what an action does to the memory; returns its seconds."""
        holding, holdings = self.chosen[visit], self.lane.holdings[visit]
        if kind is WEIGHT_GRAD:
            self.waiting.pop(0)
            self.alive_bytes -= holdings.full_bytes
            return holdings.weight_grad_seconds
        if kind is RECOMPUTE:
            use, more = self.lane.backward_place[visit], holding.early_bytes[early]
            self.early[visit] = early
            self.alive_bytes += more
            for place in range(self.place, use):
                self.profile[place] += more
            self.profile[use] += holding.use_bytes[early] - holding.use_bytes[0]
            return holding.early_seconds[early]
        self.place += 1
        if kind is FORWARD:
            self.alive_bytes += holding.held_bytes
            return holdings.forward_seconds
        self.alive_bytes -= holding.held_bytes + holding.early_bytes[early]
        if kind is BACKWARD:
            return holding.late_seconds[early] + holdings.backward_seconds
        self.alive_bytes += holdings.full_bytes
        self.waiting.append(visit)
        return holding.late_seconds[early] + holdings.input_grad_seconds

