"""Quickest placement: try several positions for the recomputes of a schedule, and take those with the shortest step.

The greedy rule ignores the work that a recompute delays, and "right before the backward" ignores idle time. Neither is
always better. So several placements are simulated, and the best one is improved by local search: a recompute on the
critical path moves one position earlier or later as long as that shortens the step.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from torchckpt.model.figures import Event
from torchckpt.model.place.greedy import greedy_orders
from torchckpt.model.schedule.action import Action, Kind
from torchckpt.model.schedule.program import Instruction, Program
from torchckpt.model.schedule.run import run
from torchckpt.model.schedule.schedule import Schedule
from torchckpt.model.simulation.critical import critical_path

__all__ = ["quickest_places"]

_Orders: TypeAlias = tuple[tuple[Action, ...], ...]

_PATIENCES = (0.0, 0.25, 0.5, 1.0)
_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD)
_WORK = 200_000
"""Budget of the local search, in simulated actions."""
_SHORTER = 1e-9
"""The smallest gain that counts, as a share of the step. Smaller ones may be rounding."""


def quickest_places(fixed: Schedule, program: Program, k: int) -> Schedule:
    """``fixed`` with its recomputes at the best positions that were tried. The step is never longer than ``fixed``'s.

    Args:
        fixed: a schedule in which each ``R`` runs ``k - 1`` backwards ahead of its own, right before a backward.
        program: the compiled program of ``fixed``.
        k: a rank recomputes only what one of its next ``k`` backwards needs.
    """
    trial = _Trial(fixed, program, k)
    for patience in _PATIENCES:
        trial.offer(greedy_orders(fixed, program, k, patience))
    trial.offer(fixed.ranks)
    trial.improve(_WORK // max(1, sum(map(len, fixed.ranks))))
    return replace(fixed, ranks=trial.orders)


class _Trial:
    """Tries orders of the same actions, and remembers the one with the shortest step."""

    def __init__(self, fixed: Schedule, program: Program, k: int) -> None:
        self.fixed, self.program, self.k = fixed, program, k
        self.instructions: list[dict[Action, Instruction]] = [
            dict(zip(order, own)) for order, own in zip(fixed.ranks, program.ranks)
        ]
        self.orders: _Orders = ()
        self.step_seconds = float("inf")

    def compiled(self, orders: _Orders) -> Program:
        ranks = tuple(tuple(own[action] for action in order) for own, order in zip(self.instructions, orders))
        return replace(self.program, ranks=ranks)

    def offer(self, orders: _Orders) -> bool:
        """Keep ``orders`` if their step is shorter. Returns whether it is."""
        step = run(self.compiled(orders)).step_seconds
        if step >= self.step_seconds * (1 - _SHORTER):
            return False
        self.orders, self.step_seconds = orders, step
        return True

    def improve(self, most: int) -> None:
        """Move single recomputes on the critical path, with at most ``most`` tries."""
        tries = iter(range(most))
        while any(self.offer(orders) for _, orders in zip(tries, self._neighbours())):
            pass

    def _neighbours(self) -> Iterator[_Orders]:
        schedule, program = replace(self.fixed, ranks=self.orders), self.compiled(self.orders)
        for event in critical_path(schedule, program, run(program)):
            if isinstance(event, Event) and event.action.kind is Kind.RECOMPUTE:
                for order in _moved(self.orders[event.rank], event.action, self.k):
                    yield (*self.orders[: event.rank], order, *self.orders[event.rank + 1 :])


def _moved(order: Sequence[Action], recompute: Action, k: int) -> Iterator[tuple[Action, ...]]:
    """``order`` with ``recompute`` one position later, then one position earlier; only orders that are allowed."""
    at = order.index(recompute)
    stage, _, i = recompute
    later, earlier = order[at + 1], order[at - 1]
    if later[::2] != (stage, i):
        yield (*order[:at], later, recompute, *order[at + 2 :])
    if earlier.kind in _BACKWARDS and _backwards_between(order, at) + 1 >= k:
        return
    if earlier[::2] != (stage, i):
        yield (*order[: at - 1], recompute, earlier, *order[at + 1 :])


def _backwards_between(order: Sequence[Action], at: int) -> int:
    """The number of backwards between the recompute at position ``at`` and its own backward."""
    found = 0
    for action in order[at + 1 :]:
        if action.kind in _BACKWARDS:
            if action[::2] == order[at][::2]:
                break
            found += 1
    return found
