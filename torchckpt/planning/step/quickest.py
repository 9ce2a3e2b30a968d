"""Quickest placement: try several positions for the recomputes of a step, and take those with the shortest step.

The greedy rule ignores the work that a recompute delays, and "right before the backward" ignores idle time. Neither is
always better. So several placements are simulated, and the best one is improved by local search: a recompute on the
critical path moves one position earlier or later as long as that shortens the step.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from torchckpt.errors import called
from torchckpt.planning.figures import Event
from torchckpt.planning.order.program import Instruction, Program, run, run_deciding
from torchckpt.planning.order.schedule import BACKWARDS, Action, Kind, Schedule, Visit
from torchckpt.planning.step.placement import with_recompute
from torchckpt.planning.step.simulated import Step, step_of
from torchckpt.planning.step.timeline import critical_path
from torchckpt.planning.work.block import Block, Links, Stages
from torchckpt.planning.work.choice import Choices

__all__ = ["greedy_orders", "quickest", "quickest_of"]

_Orders: TypeAlias = tuple[tuple[Action, ...], ...]

_PATIENCES = (0.0, 0.25, 0.5, 1.0)
_WORK = 200_000
"""Budget of the local search, in simulated actions."""
_SHORTER = 1e-9
"""The smallest gain that counts, as a share of the step. Smaller ones may be rounding."""


@called("quickest()")
def quickest(
    schedule: Schedule,
    choices: Choices,
    stages: Stages = Block(),  # noqa: B008  # frozen
    link: Links = 0.0,
    k: int = 1,
) -> Schedule:
    """``schedule`` with an ``R`` for each visit that has early blocks, where the step is shortest.

    As :func:`~torchckpt.planning.step.placement.with_recompute`, with known costs: several placements are simulated.
    The step is never longer than with each ``R`` right before a backward.

    Args:
        stages, link: as in :func:`~torchckpt.planning.step.simulated.simulate`.
        k: a rank recomputes only what one of its next ``k`` backwards needs. Default: 1.
    """
    placed = with_recompute(schedule, choices, k)
    return quickest_of(step_of(placed, stages, link, choices), k)


def quickest_of(step: Step, k: int) -> Schedule:
    """The schedule of ``step`` with its recomputes at the best positions that were tried. The step is never longer.
    ``step``: each ``R`` of its schedule runs ``k - 1`` backwards ahead of its own, right before a backward. ``k``: a
    rank recomputes only what one of its next ``k`` backwards needs."""
    program = step.compiled(apart=False)  # what a backward recomputes late does not move
    trial = _Trial(step.schedule, program, k)
    for patience in _PATIENCES:
        trial.offer(greedy_orders(step.schedule, program, k, patience))
    trial.offer(step.schedule.ranks)
    trial.improve(_WORK // max(1, sum(map(len, step.schedule.ranks))))
    return replace(step.schedule, ranks=trial.orders)


class _Trial:
    """Tries orders of the same actions, and remembers the one with the shortest step."""

    def __init__(self, schedule: Schedule, program: Program, k: int) -> None:
        self.schedule, self.program, self.k = schedule, program, k
        pairs = zip(program.actions, program.ranks)
        self.instructions: list[dict[Action, Instruction]] = [dict(zip(*pair)) for pair in pairs]
        self.orders: _Orders = ()
        self.step_seconds = float("inf")

    def compiled(self, orders: _Orders) -> Program:
        pairs = zip(self.instructions, orders)
        ranks = tuple(tuple(by_action[action] for action in order) for by_action, order in pairs)
        return replace(self.program, ranks=ranks, actions=orders)

    def offer(self, orders: _Orders) -> bool:
        """Keep ``orders`` if their step is shorter. Returns whether it is."""
        seconds = run(self.compiled(orders)).step_seconds
        if seconds >= self.step_seconds * (1 - _SHORTER):
            return False
        self.orders, self.step_seconds = orders, seconds
        return True

    def improve(self, most: int) -> None:
        """Move single recomputes on the critical path, with at most ``most`` tries."""
        tries = iter(range(most))
        while any(self.offer(orders) for _, orders in zip(tries, self._neighbours())):
            pass

    def _neighbours(self) -> Iterator[_Orders]:
        program = self.compiled(self.orders)
        for event in critical_path(self.schedule, program, run(program)):
            if isinstance(event, Event) and event.action.kind is Kind.RECOMPUTE:
                for order in _moved(self.orders[event.rank], event.action, self.k):
                    yield (*self.orders[: event.rank], order, *self.orders[event.rank + 1 :])


def _moved(order: Sequence[Action], recompute: Action, k: int) -> Iterator[tuple[Action, ...]]:
    """``order`` with ``recompute`` one position later, then one position earlier; only orders that are allowed."""
    position = order.index(recompute)
    earlier, later = order[position - 1], order[position + 1]
    if later.visit != recompute.visit:
        yield (*order[:position], later, recompute, *order[position + 2 :])
    backwards = [action.visit for action in order[position:] if action.kind in BACKWARDS]
    is_near = earlier.kind not in BACKWARDS or backwards.index(recompute.visit) + 1 < k
    if earlier.visit != recompute.visit and is_near:
        yield (*order[: position - 1], recompute, earlier, *order[position + 1 :])


def greedy_orders(
    schedule: Schedule, program: Program, k: int, patience: float = 0.0
) -> tuple[tuple[Action, ...], ...]:
    """A greedy placement: a recompute starts as soon as its rank is idle and has no forward or backward that is ready.

    Each rank decides what to run next when it becomes free; the result is the order of these decisions. A running
    action is never interrupted, so a recompute that starts just before a message arrives delays the work on that
    message. A rank with ``patience`` waits for the message instead. Forwards and backwards keep their order.

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
        self.backward_place = self._places(*BACKWARDS)
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
        visit = recompute.visit
        if self.forward_place[visit] >= self.place or self.turn[visit] >= self.backwards + self.k:
            return None
        is_worth = idle_seconds >= self.patience * self.seconds[recompute] or self._is_due()
        return recompute if is_worth else None

    def run(self, action: Action, now: float, awaited: int) -> float:
        if action.kind is Kind.RECOMPUTE:
            self.recomputes.popleft()
        else:
            self.backwards += action.kind in BACKWARDS
            self.place += 1
        self.done.append(action)
        return now + self.seconds[action]

    def _is_due(self) -> bool:
        """Whether the next forward or backward needs the next recompute."""
        return bool(self.recomputes) and self.backward_place[self.recomputes[0].visit] == self.place
