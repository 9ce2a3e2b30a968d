"""Policy: which micro-batches are recomputed, and how early."""
from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TypeAlias

from torchckpt.errors import Fault
from torchckpt.model.schedule.action import Kind
from torchckpt.model.schedule.costs import Link, StageCosts
from torchckpt.model.schedule.counts import whole
from torchckpt.model.schedule.orders import Visit
from torchckpt.model.schedule.schedule import Schedule, Segments
from torchckpt.model.simulation.inputs import per_boundary, per_stage

__all__ = ["Exemption", "Policy", "ahead", "arrival", "chosen", "faults_of", "none", "partial"]

Exemption: TypeAlias = "str | Visit"
"""``"last_stage"``, ``"last_micro_batch"``, ``"first_backward"`` (on each stage, the micro-batch whose backward runs
first), or one (stage, micro-batch). The cheapest micro-batch to keep is the one whose backward runs first: in
torchgpipe the last one, in torch the first one."""

_EXEMPTIONS = ("last_stage", "last_micro_batch", "first_backward")


@dataclass(frozen=True)
class Policy:
    """Which micro-batches are recomputed, and when. Made by :func:`none`, :func:`arrival`, :func:`ahead` and
    :func:`partial`."""

    k: int = 1
    late: bool = False
    segments: Segments = field(default_factory=Segments)
    exempt: str | Collection[Exemption] = ()
    only: Collection[Visit] | None = None
    costs: StageCosts | Sequence[StageCosts] | None = None
    link: Link | Sequence[Link] = field(default_factory=Link)


def none() -> Policy:
    """Nothing is recomputed."""
    return Policy(only=())


def arrival(exempt: str | Collection[Exemption] = (), only: Collection[Visit] | None = None) -> Policy:
    """Each recompute starts when the gradient has arrived, as in ``torch.utils.checkpoint``.

    Args:
        exempt: the micro-batches to keep: one or several of :data:`Exemption`. Default: none.
        only: the (stage, micro-batch) pairs to recompute. Default: all.
    """
    return Policy(late=True, exempt=exempt, only=only)


def ahead(
    k: int = 1,
    exempt: str | Collection[Exemption] = (),
    only: Collection[Visit] | None = None,
    costs: StageCosts | Sequence[StageCosts] | None = None,
    link: Link | Sequence[Link] = Link(),  # noqa: B008  # frozen
) -> Policy:
    """Recompute before the gradient arrives, at most ``k`` micro-batches ahead on each rank.

    Args:
        k: a rank recomputes only what one of its next ``k`` backwards needs. With 1, the peak of memory is no higher
            than at arrival.
        exempt, only: as in :func:`arrival`.
        costs, link: as in :func:`~torchckpt.model.simulation.simulator.simulate`. With ``costs``, several placements
            are simulated and the one with the shortest step is taken; its step is never longer than without ``costs``.
            Without ``costs``, each recompute runs right before a backward, ``k - 1`` backwards ahead of its own.
    """
    return Policy(k=k, exempt=exempt, only=only, costs=costs, link=link)


def partial(
    early: int,
    total: int,
    k: int = 1,
    exempt: str | Collection[Exemption] = (),
    only: Collection[Visit] | None = None,
    costs: StageCosts | Sequence[StageCosts] | None = None,
    link: Link | Sequence[Link] = Link(),  # noqa: B008  # frozen
) -> Policy:
    """As :func:`ahead`, but only for the last ``early`` of ``total`` equal segments of each stage. The backward
    recomputes the others. Early segments can be hidden in idle time; late segments save memory.

    ``early`` is at least 1. If no segment shall be early, use :func:`arrival`.
    """
    return Policy(k=k, segments=Segments(early, total), exempt=exempt, only=only, costs=costs, link=link)


def chosen(schedule: Schedule, policy: Policy) -> frozenset[Visit]:
    """The (stage, micro-batch) pairs of ``schedule`` that ``policy`` recomputes."""
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


def _first_backwards(schedule: Schedule) -> set[Visit]:
    first: dict[int, int] = {}
    for stage, kind, i in (action for order in schedule.ranks for action in order):
        if kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
            first.setdefault(stage, i)
    return set(first.items())


def _listed(exempt: str | Collection[Exemption]) -> Collection[Exemption]:
    return [exempt] if isinstance(exempt, str) else exempt


def faults_of(schedule: Schedule, policy: Policy) -> Iterator[Fault]:
    """Faults of ``policy`` itself, and of its use on ``schedule``."""
    yield from whole("k", policy.k)
    early, total = policy.segments.early, policy.segments.total
    if not 1 <= early <= total:
        rule = "1 <= early <= total segments; if no segment is early, use arrival()"
        yield Fault(rule, f"early={early}, total={total}", "partial(1, 2), or arrival()")
    if any(kind is Kind.RECOMPUTE for order in schedule.ranks for _, kind, _ in order):
        rule = "a micro-batch is recomputed once, so the schedule has no R yet"
        yield Fault(rule, f"{schedule.name!r} with R", "the schedule before with_recompute()")
    yield from _exempt_faults(schedule, policy.exempt)
    if policy.only is not None:
        yield from _visit_faults(schedule, "only", policy.only)
    if policy.costs is not None:
        yield from per_stage(policy.costs, schedule.stages)[1]
        yield from per_boundary(policy.link, schedule.stages)[1]


def _exempt_faults(schedule: Schedule, exempt: str | Collection[Exemption]) -> Iterator[Fault]:
    if isinstance(exempt, Collection):
        for one in _listed(exempt):
            if isinstance(one, str) and one not in _EXEMPTIONS:
                rule = f"an exemption is one of {', '.join(_EXEMPTIONS)}, or a (stage, micro-batch)"
                yield Fault(rule, repr(one), repr(get_close_matches(one, _EXEMPTIONS, n=1, cutoff=0.0)[0]))
        yield from _visit_faults(schedule, "exempt", [one for one in _listed(exempt) if not isinstance(one, str)])
    else:
        yield from _visit_faults(schedule, "exempt", exempt)


def _visit_faults(schedule: Schedule, name: str, visits: object) -> Iterator[Fault]:
    if not isinstance(visits, Collection) or isinstance(visits, str):
        yield Fault(f"{name} is a collection of (stage, micro-batch)", f"{name}={visits!r}", f"{name}={{(0, 0)}}")
        return
    for visit in visits:
        if not _is_there(schedule, visit):
            rule = f"stages are 0 to {schedule.stages - 1}, micro-batches 0 to {schedule.micro_batches - 1}"
            yield Fault(rule, repr(visit), "(0, 0)")


def _is_there(schedule: Schedule, one: object) -> bool:
    if not (isinstance(one, tuple) and len(one) == 2 and all(isinstance(number, int) for number in one)):
        return False
    stage, i = one
    return bool(0 <= stage < schedule.stages and 0 <= i < schedule.micro_batches)
