"""Placement: where recomputation stands in a schedule.

A recomputation may begin long before the gradient that it is for arrives; all it needs is the boundary, and an idle
engine. A :class:`Policy` says which micro-batches of which stages are recomputed, and how early.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TypeAlias

from torchckpt.errors import Fault, raise_faults
from torchckpt.model.action import Action, Kind
from torchckpt.model.costs import Link, StageCosts
from torchckpt.model.counts import whole
from torchckpt.model.greedy import greedy_orders
from torchckpt.model.inputs import per_boundary, per_stage
from torchckpt.model.program import compile_program
from torchckpt.model.schedule import Schedule, Segments
from torchckpt.model.validity import check_order, check_schedule

__all__ = ["Exemption", "Policy", "ahead", "arrival", "none", "partial", "with_recompute"]
Exemption: TypeAlias = "str | tuple[int, int]"
"""``"last_stage"``, ``"last_micro_batch"``, ``"first_backward"`` (of each stage, the micro-batch that goes back first),
or one (stage, micro-batch)."""

_EXEMPTIONS = ("last_stage", "last_micro_batch", "first_backward")
_CALLER = "with_recompute()"


@dataclass(frozen=True)
class Policy:
    """What is recomputed, and when. Made by :func:`none`, :func:`arrival`, :func:`ahead` and :func:`partial`."""

    k: int = 1
    late: bool = False
    segments: Segments = Segments()
    exempt: str | Collection[Exemption] = ()
    only: Collection[tuple[int, int]] | None = None
    costs: StageCosts | Sequence[StageCosts] | None = None
    link: Link | Sequence[Link] = Link()


def none() -> Policy:
    """Nothing is recomputed."""
    return Policy(only=())


def arrival(exempt: str | Collection[Exemption] = (), only: Collection[tuple[int, int]] | None = None) -> Policy:
    """Each recompute starts when the gradient has arrived, as ``torch.utils.checkpoint`` does it.

    Args:
        exempt: what to keep instead: one or several of :data:`Exemption`.
        only: the (stage, micro-batch) to recompute. Default: all.
    """
    return Policy(late=True, exempt=exempt, only=only)


def ahead(
    k: int = 1,
    exempt: str | Collection[Exemption] = (),
    only: Collection[tuple[int, int]] | None = None,
    costs: StageCosts | Sequence[StageCosts] | None = None,
    link: Link | Sequence[Link] = Link(),  # noqa: B008  # frozen
) -> Policy:
    """Recompute before the gradient arrives, at most ``k`` micro-batches ahead on each rank.

    Args:
        k: so many micro-batches of a rank may be recomputed whose backward has not begun.
        exempt, only: as in :func:`arrival`.
        costs, link: as in :func:`~torchckpt.model.simulator.simulate`. With them a recompute stands where a rank would
            idle otherwise, by a simulation of the greedy rule; without, right before the backward that it is ``k - 1``
            backwards ahead of.
    """
    return Policy(k=k, exempt=exempt, only=only, costs=costs, link=link)


def partial(
    early: int,
    total: int,
    k: int = 1,
    exempt: str | Collection[Exemption] = (),
    only: Collection[tuple[int, int]] | None = None,
    costs: StageCosts | Sequence[StageCosts] | None = None,
    link: Link | Sequence[Link] = Link(),  # noqa: B008  # frozen
) -> Policy:
    """As :func:`ahead`, for the last ``early`` of ``total`` segments of each stage; the others are recomputed inside
    the backward. Early segments hide, late ones save memory.

    ``early`` is at least 1: with none of them early, recompute at :func:`arrival`.
    """
    return Policy(k=k, segments=Segments(early, total), exempt=exempt, only=only, costs=costs, link=link)


def with_recompute(schedule: Schedule, policy: Policy | Callable[[Schedule], Schedule]) -> Schedule:
    """``schedule`` with the recomputes of ``policy``; forwards and backwards keep their order.

    >>> [str(action) for action in with_recompute(one_f_one_b(2, 2), ahead()).ranks[0]]
    ['0F0', '0F1', '0R0', '0B0', '0R1', '0B1']

    Args:
        policy: or a function of your own that places each ``R``.

    Raises:
        ArgumentError: the policy is wrong in itself, names what the schedule does not have, or places a recompute
            where it would stop the ranks or be done twice.
    """
    if callable(policy):
        placed = policy(schedule)
        check_schedule(_CALLER, placed)
        return placed
    check_order(_CALLER, schedule)
    raise_faults(_CALLER, _faults(schedule, policy))
    chosen = _chosen(schedule, policy)
    return _placed(schedule, policy, chosen) if chosen else schedule


def _placed(schedule: Schedule, policy: Policy, chosen: frozenset[tuple[int, int]]) -> Schedule:
    partly = policy.segments != Segments()
    fixed = replace(
        schedule,
        ranks=tuple(tuple(_before_backwards(order, chosen, policy.k)) for order in schedule.ranks),
        late=chosen if policy.late else frozenset(),
        segments=(policy.segments,) * schedule.stages if partly else (),
    )
    if policy.costs is None:
        return fixed
    costs, _ = per_stage(policy.costs, schedule.stages)
    links, _ = per_boundary(policy.link, schedule.stages)
    return replace(fixed, ranks=greedy_orders(fixed, compile_program(fixed, costs, links), policy.k))


def _before_backwards(order: Sequence[Action], chosen: Collection[tuple[int, int]], k: int) -> Iterator[Action]:
    """Before the n-th backward of those ``chosen``, the recomputes up to the one k - 1 further; each after its forward."""
    backwards = [
        Action(stage, Kind.RECOMPUTE, i)
        for stage, kind, i in order
        if kind in (Kind.BACKWARD, Kind.INPUT_GRAD) and (stage, i) in chosen
    ]
    run_forward: set[tuple[int, int]] = set()
    used = recomputed = 0
    for action in order:
        stage, kind, i = action
        if kind is Kind.FORWARD:
            run_forward.add((stage, i))
        elif kind in (Kind.BACKWARD, Kind.INPUT_GRAD) and (stage, i) in chosen:
            while recomputed < min(used + k, len(backwards)):
                ahead_of = backwards[recomputed]
                if (ahead_of.stage, ahead_of.micro_batch) not in run_forward:
                    break
                yield ahead_of
                recomputed += 1
            used += 1
        yield action


def _chosen(schedule: Schedule, policy: Policy) -> frozenset[tuple[int, int]]:
    stages, m = schedule.stages, schedule.micro_batches
    every = {(stage, i) for stage in range(stages) for i in range(m)} if policy.only is None else set(policy.only)
    for exempt in _listed(policy.exempt):
        if exempt == "last_stage":
            every -= {(stages - 1, i) for i in range(m)}
        elif exempt == "last_micro_batch":
            every -= {(stage, m - 1) for stage in range(stages)}
        elif exempt == "first_backward":
            every -= _first_backwards(schedule)
        elif not isinstance(exempt, str):
            every.discard(exempt)
    return frozenset(every)


def _first_backwards(schedule: Schedule) -> set[tuple[int, int]]:
    first: dict[int, int] = {}
    for stage, kind, i in (action for order in schedule.ranks for action in order):
        if kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
            first.setdefault(stage, i)
    return set(first.items())


def _listed(exempt: str | Collection[Exemption]) -> Collection[Exemption]:
    return [exempt] if isinstance(exempt, str) else exempt


def _faults(schedule: Schedule, policy: Policy) -> Iterator[Fault]:
    yield from whole("k", policy.k)
    early, total = policy.segments.early, policy.segments.total
    if not 1 <= early <= total:
        rule = "1 <= early <= total segments; with none early, recompute at arrival"
        yield Fault(rule, f"early={early}, total={total}", "partial(1, 2), or arrival()")
    if any(kind is Kind.RECOMPUTE for order in schedule.ranks for _, kind, _ in order):
        rule = "a micro-batch is recomputed once, so the schedule has no R yet"
        yield Fault(rule, f"{schedule.name!r} with R", "the schedule before with_recompute()")
    exempt = list(_listed(policy.exempt))
    for one in exempt:
        if isinstance(one, str) and one not in _EXEMPTIONS:
            rule = f"what is exempt is one of {', '.join(_EXEMPTIONS)}, or a (stage, micro-batch)"
            yield Fault(rule, repr(one), repr(get_close_matches(one, _EXEMPTIONS, n=1, cutoff=0.0)[0]))
    for one in [*(one for one in exempt if not isinstance(one, str)), *(policy.only or ())]:
        if not _is_there(schedule, one):
            rule = f"stages are 0 to {schedule.stages - 1}, micro-batches 0 to {schedule.micro_batches - 1}"
            yield Fault(rule, repr(one), "(0, 0)")
    if policy.costs is not None:
        yield from per_stage(policy.costs, schedule.stages)[1]
        yield from per_boundary(policy.link, schedule.stages)[1]


def _is_there(schedule: Schedule, one: object) -> bool:
    if not (isinstance(one, tuple) and len(one) == 2 and all(isinstance(number, int) for number in one)):
        return False
    return 0 <= one[0] < schedule.stages and 0 <= one[1] < schedule.micro_batches
