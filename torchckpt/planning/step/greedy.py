"""Greedy placement: a recompute starts as soon as its rank is idle and has no forward or backward that is ready.

An event-driven simulation: each rank decides what to run next when it becomes free. The result is the order of these
decisions. A running action is never interrupted, so a recompute that starts just before a message arrives delays the
work on that message. A rank with ``patience`` waits for the message instead.
"""
from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from torchckpt.planning.order.orders import Visit
from torchckpt.planning.order.program import NOTHING, Instruction, Program
from torchckpt.planning.order.schedule import Action, Kind, Schedule

__all__ = ["greedy_orders"]


def greedy_orders(
    schedule: Schedule, program: Program, k: int, patience: float = 0.0
) -> tuple[tuple[Action, ...], ...]:
    """The new order of actions of each rank. Forwards and backwards keep their order; only recomputes move.

    Args:
        schedule: a schedule in which each ``R`` stands before its backward, in the order of the backwards.
        k: a rank recomputes only what one of its next ``k`` backwards needs.
        patience: a share from 0 to 1. A rank that knows when its next message arrives starts a recompute first only if
            at least this share of the recompute is done when the message arrives. Default: 0, never wait.
    """
    lanes = [_Lane(order, instructions, k) for order, instructions in zip(schedule.ranks, program.ranks)]
    _Clock(lanes, program, patience).run()
    return tuple(tuple(lane.done) for lane in lanes)


class _Lane:
    """One rank: its forwards and backwards in order (``main``), and its recomputes in order (``aside``)."""

    def __init__(self, order: Sequence[Action], instructions: Sequence[Instruction], k: int) -> None:
        self.k = k
        self.done: list[Action] = []
        self.main: list[tuple[Action, Instruction]] = []
        self.aside: list[tuple[Action, Instruction]] = []
        for pair in zip(order, instructions):
            (self.aside if pair[0].kind is Kind.RECOMPUTE else self.main).append(pair)
        self.forward_at = self._places(Kind.FORWARD)
        self.backward_at = self._places(Kind.BACKWARD, Kind.INPUT_GRAD)
        self.turn = {visit: turn for turn, visit in enumerate(self.backward_at)}
        self.next_main = self.next_aside = self.backwards = 0

    def _places(self, *kinds: Kind) -> dict[Visit, int]:
        return {(stage, i): place for place, ((stage, kind, i), _) in enumerate(self.main) if kind in kinds}

    @property
    def is_recomputed(self) -> bool:
        """Whether the next forward or backward can run without another recompute first."""
        return self.next_aside == len(self.aside) or self.backward_at[self._due] != self.next_main

    @property
    def may_recompute(self) -> bool:
        """Whether the next recompute may start: its forward is done, and its backward is among the next k."""
        if self.next_aside == len(self.aside):
            return False
        return self.forward_at[self._due] < self.next_main and self.turn[self._due] < self.backwards + self.k

    @property
    def _due(self) -> Visit:
        stage, _, i = self.aside[self.next_aside][0]
        return stage, i

    def awaited(self) -> int:
        """The token that the next forward or backward waits for."""
        return self.main[self.next_main][1][0]

    def recompute_seconds(self) -> float:
        """Duration of the next recompute."""
        return self.aside[self.next_aside][1][2]

    def take_main(self) -> Instruction:
        action, instruction = self.main[self.next_main]
        self.backwards += action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD)
        self.next_main += 1
        self.done.append(action)
        return instruction

    def take_aside(self) -> Instruction:
        action, instruction = self.aside[self.next_aside]
        self.next_aside += 1
        self.done.append(action)
        return instruction


class _Clock:
    """Wakes each rank when it has finished an action, or when the input that it waits for arrives."""

    def __init__(self, lanes: list[_Lane], program: Program, patience: float) -> None:
        self.lanes, self.patience = lanes, patience
        self.arrived: dict[int, float] = dict.fromkeys(program.given, 0.0)
        self.wire_free = [0.0] * program.wires
        self.waiting: dict[int, tuple[int, float]] = {}
        self.agenda = [(0.0, rank) for rank in range(len(lanes))]

    def run(self) -> None:
        while self.agenda:
            now, rank = heappop(self.agenda)
            self._wake(rank, now)

    def _wake(self, rank: int, now: float) -> None:
        lane = self.lanes[rank]
        if lane.next_main == len(lane.main):
            return
        token = lane.awaited()
        there = 0.0 if token == NOTHING else self.arrived.get(token)
        if there is not None and there <= now and lane.is_recomputed:
            self._start(rank, lane.take_main(), now)
        elif lane.may_recompute and not self._waits(lane, now, there):
            self._start(rank, lane.take_aside(), now)
        elif there is None:
            self.waiting[token] = rank, now
        else:
            heappush(self.agenda, (there, rank))

    def _waits(self, lane: _Lane, now: float, there: float | None) -> bool:
        """Whether the rank waits for its message instead of starting a recompute first."""
        if there is None or not lane.is_recomputed:
            return False
        return there - now < self.patience * lane.recompute_seconds()

    def _start(self, rank: int, instruction: Instruction, now: float) -> None:
        _, gives, seconds, wire, travel = instruction
        end = now + seconds
        heappush(self.agenda, (end, rank))
        if gives == NOTHING:
            return
        arrives = end
        if wire != NOTHING:
            arrives = self.wire_free[wire] = max(end, self.wire_free[wire]) + travel
        self.arrived[gives] = arrives
        if gives in self.waiting:
            waiter, since = self.waiting.pop(gives)
            heappush(self.agenda, (max(arrives, since), waiter))
