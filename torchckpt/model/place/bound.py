"""Bound: the recomputation that no placement can hide.

In a step of length T, rank j cannot start before the first input has reached it (its *head*). After its last backward,
the gradient must still travel to the first stage (its *tail*). In between, the rank is busy or idle. The idle time is
its room::

    room_j = T - head_j - busy_j - tail_j,      overhead >= max_j max(0, r_j tr_j - room_j)

where ``r_j`` micro-batches are recomputed in ``tr_j`` seconds each. Recomputation can be hidden in three places only:

* bubbles: the room that exists even if messages take no time; independent of the number of micro-batches;
* point-to-point stalls: the room that messages add; grows with the number of micro-batches;
* collectives inside a stage, while the rank does not compute.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchckpt.errors import raise_faults
from torchckpt.model.place.idle import in_any_order, in_this_order
from torchckpt.model.place.placement import without_recompute
from torchckpt.model.schedule.action import Kind
from torchckpt.model.schedule.costs import Link, StageCosts
from torchckpt.model.schedule.schedule import Schedule
from torchckpt.model.schedule.validity import check_schedule
from torchckpt.model.simulation.inputs import per_boundary, per_stage

__all__ = ["Bound", "Supply", "bound"]

_CALLER = "bound()"


@dataclass(frozen=True)
class Supply:
    """Where the recomputation of one rank can be hidden, at best. The last four fields sum to ``recompute_seconds``."""

    rank: int
    recompute_seconds: float
    bubble_seconds: float
    """Hidden in bubbles."""
    stall_seconds: float
    """Hidden while messages travel."""
    collective_seconds: float
    """Hidden beside collectives."""
    exposed_seconds: float
    """Seconds that cannot be hidden."""


@dataclass(frozen=True)
class Bound:
    """No placement makes the step shorter than ``step_seconds``."""

    plain_seconds: float
    """Seconds of the step without recomputation. With ``any_order``, a lower bound of them."""
    supplies: tuple[Supply, ...]
    """One for each rank."""

    @property
    def overhead_seconds(self) -> float:
        """The least seconds that recomputation adds: the largest ``exposed_seconds`` of all ranks."""
        return max((supply.exposed_seconds for supply in self.supplies), default=0.0)

    @property
    def step_seconds(self) -> float:
        return self.plain_seconds + self.overhead_seconds


def bound(
    schedule: Schedule,
    costs: StageCosts | Sequence[StageCosts] = StageCosts(),  # noqa: B008  # frozen
    link: Link | Sequence[Link] = Link(),  # noqa: B008  # frozen
    *,
    any_order: bool = False,
) -> Bound:
    """A lower bound on the step of ``schedule``, for every placement of its recomputes.

    >>> schedule = with_recompute(one_f_one_b(2, 8), ahead(exempt="last_stage"))
    >>> bound(schedule).overhead_seconds, bound(schedule).plain_seconds
    (5.0, 27.0)

    Args:
        schedule: a schedule with recomputes. Only their number matters; their positions do not.
        costs, link: as in :func:`~torchckpt.model.simulation.simulator.simulate`.
        any_order: bound all orders of forwards and backwards, too. Only the stages on each rank, the number of
            micro-batches, split or whole backwards, and the number of recomputes are taken from ``schedule``. Both
            ``plain_seconds`` and ``step_seconds`` then hold for every order. Their difference does not bound the
            overhead of one given order, which may have more room than the best order. Default: False.

    Raises:
        ArgumentError: as :func:`~torchckpt.model.simulation.simulator.simulate`.
    """
    check_schedule(_CALLER, schedule)
    stages, wrong_costs = per_stage(costs, schedule.stages)
    links, wrong_links = per_boundary(link, schedule.stages)
    raise_faults(_CALLER, wrong_costs + wrong_links)
    measure = in_any_order if any_order else in_this_order
    plain = without_recompute(schedule)
    room = measure(plain, stages, links)
    bubbles = measure(plain, stages, [Link()] * len(links))
    supplies = (
        _supply(rank, schedule, stages, room.seconds[rank], bubbles.seconds[rank])
        for rank in range(len(schedule.ranks))
    )
    return Bound(room.step_seconds, tuple(supplies))


def _supply(rank: int, schedule: Schedule, costs: Sequence[StageCosts], room: float, bubbles: float) -> Supply:
    recomputing = [stage for stage, kind, _ in schedule.ranks[rank] if kind is Kind.RECOMPUTE]
    demand = left = sum(costs[stage].recompute_seconds for stage in recomputing)
    in_bubbles = min(left, room, bubbles)
    left -= in_bubbles
    in_stalls = min(left, room - in_bubbles)
    left -= in_stalls
    own = [stage for stage, there in enumerate(schedule.placement) if there == rank]
    beside = min(left, schedule.micro_batches * sum(costs[stage].collective_seconds for stage in own))
    return Supply(rank, demand, in_bubbles, in_stalls, beside, left - beside)
