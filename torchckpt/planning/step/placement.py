"""Placement: insert the recomputes of a policy into a schedule.

A recompute needs only the stage's input and an idle rank, so it may start long before its gradient arrives.
"""
from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from torchckpt.errors import Fault, called, check
from torchckpt.planning.order.schedule import BACKWARDS, Action, Kind, Schedule, Visit, whole
from torchckpt.planning.order.validity import check_order
from torchckpt.planning.work.choice import Choice, Choices, State, visit_faults

__all__ = ["recomputed_early", "with_recompute", "without"]


@called("with_recompute()")
def with_recompute(schedule: Schedule, choices: Choices, k: int = 1) -> Schedule:
    """``schedule`` with an ``R`` for each visit that has early blocks. Forwards and backwards keep their order.

    >>> plain = one_f_one_b(2, 2)
    >>> [str(action) for action in with_recompute(plain, ahead(plain)).ranks[0]]
    ['0F0', '0F1', '0R0', '0B0', '0R1', '0B1']

    Args:
        k: a rank recomputes only what one of its next ``k`` backwards needs: each recompute stands right before a
            backward, ``k - 1`` backwards ahead of its own. With 1, the peak of memory is no higher than at arrival.
            Default: 1.

    Raises:
        ArgumentError: a choice is of a stage or micro-batch that the schedule does not have, or the schedule has
            recomputes already.
    """
    check_order(schedule)
    faults = [*whole("k", k), *visit_faults(schedule, choices)]
    if recomputed_early(schedule):
        rule = "the schedule has R already, and a micro-batch is recomputed once"
        faults.append(Fault(rule, f"{schedule.name!r} with R", "the schedule before with_recompute()"))
    check(faults)
    visits = {visit for visit, choice in choices.items() if _has_early(choice)}
    ranks = (tuple(_before_backwards(order, visits, k)) for order in schedule.ranks)
    return replace(schedule, ranks=tuple(ranks)) if visits else schedule


def without(schedule: Schedule, kind: Kind = Kind.RECOMPUTE) -> Schedule:
    """``schedule`` without its actions of one kind. Default: without recomputes."""
    ranks = (tuple(action for action in order if action.kind is not kind) for order in schedule.ranks)
    return replace(schedule, ranks=tuple(ranks))


def recomputed_early(schedule: Schedule) -> frozenset[Visit]:
    """The visits that have an ``R`` in ``schedule``."""
    return frozenset((stage, i) for order in schedule.ranks for stage, kind, i in order if kind is Kind.RECOMPUTE)


def _has_early(choice: Choice | State) -> bool:
    if isinstance(choice, State):
        return choice.restored_by is Kind.RECOMPUTE
    return bool(choice.restored_by(Kind.RECOMPUTE))


def _before_backwards(order: Sequence[Action], visits: Collection[Visit], k: int) -> Iterator[Action]:
    """``order`` with the recomputes for a backward and for the next ``k - 1`` placed right before that backward. A
    recompute whose forward has not run yet comes before a later backward."""
    backwards = [(stage, i) for stage, kind, i in order if kind in BACKWARDS]
    alive: set[Visit] = set()
    begun = reached = 0
    for action in order:
        stage, kind, i = action
        if kind is Kind.FORWARD:
            alive.add((stage, i))
        elif kind in BACKWARDS:
            while reached < min(begun + k, len(backwards)) and backwards[reached] in alive:
                if backwards[reached] in visits:
                    yield Action(backwards[reached][0], Kind.RECOMPUTE, backwards[reached][1])
                reached += 1
            begun += 1
        yield action
