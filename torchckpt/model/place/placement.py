"""Placement: insert recomputes into a schedule.

A recompute needs only the stage's input and an idle rank, so it may start long before its gradient arrives.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from torchckpt.errors import Fault, raise_faults
from torchckpt.model.place.policy import Policy, ahead, arrival, chosen, faults_of, none, partial
from torchckpt.model.place.quickest import quickest_places
from torchckpt.model.schedule.action import Action, Kind
from torchckpt.model.schedule.orders import Visit
from torchckpt.model.schedule.program import compile_program
from torchckpt.model.schedule.schedule import Schedule, Segments
from torchckpt.model.schedule.validity import check_order, check_schedule
from torchckpt.model.simulation.inputs import per_boundary, per_stage

__all__ = ["Policy", "ahead", "arrival", "none", "partial", "with_recompute", "without_recompute"]

_CALLER = "with_recompute()"


def with_recompute(schedule: Schedule, policy: Policy | Callable[[Schedule], Schedule]) -> Schedule:
    """``schedule`` with the recomputes of ``policy`` inserted. Forwards and backwards keep their order.

    >>> [str(action) for action in with_recompute(one_f_one_b(2, 2), ahead()).ranks[0]]
    ['0F0', '0F1', '0R0', '0B0', '0R1', '0B1']

    Args:
        policy: a policy such as ``ahead()``, or a function that takes the schedule and returns one with each ``R``
            placed.

    Raises:
        ArgumentError: the policy is invalid, names a stage or micro-batch that the schedule does not have, or places a
            recompute where it would cause a deadlock or run twice.
    """
    if callable(policy):
        placed = policy(schedule)
        check_schedule(_CALLER, placed)
        return placed
    check_order(_CALLER, schedule)
    if not isinstance(policy, Policy):
        rule = "a policy is a Policy, or a function that places each R"
        raise_faults(_CALLER, [Fault(rule, repr(policy), "ahead()")])
    raise_faults(_CALLER, faults_of(schedule, policy))
    keys = chosen(schedule, policy)
    if not keys:
        return schedule
    placed = _placed(schedule, policy, keys)
    check_schedule(_CALLER, placed)
    return placed


def without_recompute(schedule: Schedule) -> Schedule:
    """``schedule`` as it was before :func:`with_recompute`."""

    def kept(order: tuple[Action, ...]) -> tuple[Action, ...]:
        return tuple(action for action in order if action.kind is not Kind.RECOMPUTE)

    return replace(schedule, ranks=tuple(map(kept, schedule.ranks)), late=frozenset(), segments=())


def _placed(schedule: Schedule, policy: Policy, keys: frozenset[Visit]) -> Schedule:
    partly = policy.segments != Segments()
    fixed = replace(
        schedule,
        ranks=tuple(tuple(_before_backwards(order, keys, policy.k)) for order in schedule.ranks),
        late=keys if policy.late else frozenset(),
        segments=(policy.segments,) * schedule.stages if partly else (),
    )
    if policy.costs is None or policy.late:
        return fixed
    costs, _ = per_stage(policy.costs, schedule.stages)
    links, _ = per_boundary(policy.link, schedule.stages)
    return quickest_places(fixed, compile_program(fixed, costs, links), policy.k)


def _before_backwards(order: Sequence[Action], keys: Collection[Visit], k: int) -> Iterator[Action]:
    """``order`` with the recomputes for a backward and for the next ``k - 1`` placed right before that backward. A
    recompute whose forward has not run yet comes before a later backward."""
    backwards = [(stage, i) for stage, kind, i in order if kind in (Kind.BACKWARD, Kind.INPUT_GRAD)]
    alive: set[Visit] = set()
    begun = reached = 0
    for action in order:
        stage, kind, i = action
        if kind is Kind.FORWARD:
            alive.add((stage, i))
        elif kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
            while reached < min(begun + k, len(backwards)) and backwards[reached] in alive:
                if backwards[reached] in keys:
                    yield Action(backwards[reached][0], Kind.RECOMPUTE, backwards[reached][1])
                reached += 1
            begun += 1
        yield action
