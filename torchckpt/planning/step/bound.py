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

from dataclasses import dataclass, replace

from torchckpt.errors import called
from torchckpt.planning.order.schedule import Schedule
from torchckpt.planning.order.validity import check_schedule
from torchckpt.planning.step.idle import in_any_order, in_this_order
from torchckpt.planning.step.placement import without
from torchckpt.planning.step.simulated import Step, step_of
from torchckpt.planning.work.block import Block, Link
from torchckpt.planning.work.choice import Choices
from torchckpt.planning.work.inputs import Links, Stages

__all__ = ["Bound", "Supply", "bound", "bound_of"]



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


@called("bound()")
def bound(
    schedule: Schedule,
    stages: Stages = Block(),  # noqa: B008  # frozen
    link: Links = 0.0,
    choices: Choices | None = None,
    *,
    any_order: bool = False,
) -> Bound:
    """A lower bound on the step of ``schedule``, for every placement of its recomputes.

    >>> schedule = one_f_one_b(2, 8)
    >>> least = bound(schedule, choices=exempt(schedule, ahead(schedule), "last_stage"))
    >>> least.overhead_seconds, least.plain_seconds
    (5.0, 27.0)

    Args:
        stages, link, choices: as in :func:`~torchckpt.planning.step.simulated.simulate`. Only how much is recomputed
            matters; when does not.
        any_order: bound all orders of forwards and backwards, too. Only the stages on each rank, the number of
            micro-batches, split or whole backwards, and the recomputation are taken from ``schedule``. Both
            ``plain_seconds`` and ``step_seconds`` then hold for every order. Their difference does not bound the
            overhead of one given order, which may have more room than the best order. Default: False.

    Raises:
        ArgumentError: as :func:`~torchckpt.planning.step.simulated.simulate`.
    """
    check_schedule(schedule)
    return bound_of(step_of(schedule, stages, link, choices), any_order)


def bound_of(step: Step, any_order: bool = False) -> Bound:
    """The bound for the recomputation of ``step``; see :func:`bound`."""
    measure = in_any_order if any_order else in_this_order
    plain = replace(step, schedule=without(step.schedule), choices={})
    room = measure(plain)
    bubbles = measure(replace(plain, links=(Link(),) * len(step.links)))
    seconds = [0.0] * len(step.schedule.ranks)
    for (stage, _), recompute in step.recomputed.items():
        seconds[step.schedule.placement[stage]] += recompute
    rooms = zip(seconds, room.seconds, bubbles.seconds)
    return Bound(room.step_seconds, tuple(_supply(rank, step, *each) for rank, each in enumerate(rooms)))


def _supply(rank: int, step: Step, demand: float, room: float, bubbles: float) -> Supply:
    left = demand
    in_bubbles = min(left, room, bubbles)
    left -= in_bubbles
    in_stalls = min(left, room - in_bubbles)
    left -= in_stalls
    stages = [stage for stage, home in zip(step.stages, step.schedule.placement) if home == rank]
    beside = min(left, step.schedule.micro_batches * sum(stage.collective_seconds for stage in stages))
    return Supply(rank, demand, in_bubbles, in_stalls, beside, left - beside)
