"""Greedy placement: a recompute starts as soon as its rank is idle and has no forward or backward that is ready.

Each rank decides what to run next when it becomes free; the result is the order of these decisions. A running action is
never interrupted, so a recompute that starts just before a message arrives delays the work on that message. A rank with
``patience`` waits for the message instead.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from torchckpt.planning.order.orders import Visit
from torchckpt.planning.order.program import Instruction, Program, run_deciding
from torchckpt.planning.order.schedule import Action, Kind, Schedule

__all__ = ["greedy_orders"]

_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD)


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
    ranks = [_Rank(*pair, k, patience) for pair in zip(schedule.ranks, program.ranks)]
    main = (
        tuple(instruction for action, instruction in zip(*pair) if action.kind is not Kind.RECOMPUTE)
        for pair in zip(schedule.ranks, program.ranks)
    )
    run_deciding(replace(program, ranks=tuple(main)), ranks)
    return tuple(tuple(rank.done) for rank in ranks)


class _Rank:
    """One rank: its forwards and backwards in order (``main``), and its recomputes in order."""

    left_seconds = 0.0

    def __init__(self, order: Sequence[Action], instructions: Sequence[Instruction], k: int, patience: float) -> None:
        self.k, self.patience = k, patience
        self.seconds = {action: seconds for action, (_, _, seconds, _, _) in zip(order, instructions)}
        self.main = [action for action in order if action.kind is not Kind.RECOMPUTE]
        self.recomputes = deque(action for action in order if action.kind is Kind.RECOMPUTE)
        self.forward_place = self._places(Kind.FORWARD)
        self.backward_place = self._places(*_BACKWARDS)
        self.turn = {visit: turn for turn, visit in enumerate(self.backward_place)}
        self.place = self.backwards = 0
        self.done: list[Action] = []

    def _places(self, *kinds: Kind) -> dict[Visit, int]:
        return {(stage, i): place for place, (stage, kind, i) in enumerate(self.main) if kind in kinds}

    def next_in_order(self) -> Action:
        return self.recomputes[0] if self._is_due() else self.main[self.place]

    def while_idle(self, idle_seconds: float) -> Action | None:
        if not self.recomputes:
            return None
        recompute = self.recomputes[0]
        visit = recompute.stage, recompute.micro_batch
        if self.forward_place[visit] >= self.place or self.turn[visit] >= self.backwards + self.k:
            return None
        is_worth = idle_seconds >= self.patience * self.seconds[recompute] or self._is_due()
        return recompute if is_worth else None

    def run(self, action: Action, now: float, awaited: int) -> float:
        if action.kind is Kind.RECOMPUTE:
            self.recomputes.popleft()
        else:
            self.backwards += action.kind in _BACKWARDS
            self.place += 1
        self.done.append(action)
        return now + self.seconds[action]

    def _is_due(self) -> bool:
        """Whether the next forward or backward needs the next recompute."""
        return bool(self.recomputes) and self.backward_place[self.recomputes[0][::2]] == self.place
