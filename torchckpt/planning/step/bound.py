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
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from torchckpt.errors import called
from torchckpt.planning.order.program import NOTHING, Instruction, Program, run
from torchckpt.planning.order.schedule import Kind, Schedule
from torchckpt.planning.order.validity import check_schedule
from torchckpt.planning.step.placement import without
from torchckpt.planning.step.simulated import Step, step_of
from torchckpt.planning.work.block import Block, Link, Links, Stages
from torchckpt.planning.work.choice import Choices

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
    measure = _in_any_order if any_order else _in_this_order
    plain = replace(step, schedule=without(step.schedule), choices={})
    room = measure(plain)
    bubbles = measure(replace(plain, links=(Link(),) * len(step.links)))
    seconds = [0.0] * len(step.schedule.ranks)
    for (stage, _), recompute in step.recomputed.items():
        seconds[step.schedule.placement[stage]] += recompute
    rooms = zip(seconds, room.seconds, bubbles.seconds)
    return Bound(room.step_seconds, tuple(_supply(rank, step, *each) for rank, each in enumerate(rooms)))


def _supply(rank: int, step: Step, demand: float, room: float, bubbles: float) -> Supply:
    in_bubbles = min(demand, room, bubbles)
    in_stalls = min(demand, room) - in_bubbles
    left = demand - in_bubbles - in_stalls
    stages = [stage for stage, home in zip(step.stages, step.schedule.placement) if home == rank]
    beside = min(left, step.schedule.micro_batches * sum(stage.collective_seconds for stage in stages))
    return Supply(rank, demand, in_bubbles, in_stalls, beside, left - beside)


class _Room(NamedTuple):
    """For a step without recomputation: its seconds, and for each rank its idle seconds."""

    step_seconds: float
    seconds: tuple[float, ...]


def _in_this_order(step: Step) -> _Room:
    """The room of ``step`` in its given order. The head of a rank is the time before its first action; its tail is the
    least time that the step takes after its last action."""
    program, forth, back = step.program, step.run, run(_reversed(step.program))
    rooms = []
    for rank, instructions in enumerate(program.ranks):
        busy = sum(seconds for _, _, seconds, _, _ in instructions)
        ends = forth.starts[rank][0] + back.starts[rank][0] if instructions else 0.0
        rooms.append(max(0.0, forth.step_seconds - ends - busy))
    return _Room(forth.step_seconds, tuple(rooms))


def _in_any_order(step: Step) -> _Room:
    """The room of ``step`` if its actions could run in any order. The step is at least as long as the time that one
    rank needs, and as the time that one micro-batch needs; the longest of these is taken.

    If backwards are split, a rank may run its weight gradients last, while other ranks still send gradients back.
    """
    schedule, stages = step.schedule, step.stages
    split = any(kind is Kind.INPUT_GRAD for order in schedule.ranks for _, kind, _ in order)
    pairs = zip(step.travel_seconds, schedule.placement, schedule.placement[1:])
    travels = [0.0 if sender == receiver else seconds for seconds, sender, receiver in pairs]
    forwards = [stage.forward_seconds for stage in stages]
    backwards = [stage.input_grad_seconds + (0.0 if split else stage.weight_grad_seconds) for stage in stages]
    heads, tails = _totals(forwards, travels), _totals(backwards, travels)
    needs = [0.0] * len(schedule.ranks)
    for rank in set(schedule.placement):
        on_rank = [stage for stage, home in enumerate(schedule.placement) if home == rank]
        m = schedule.micro_batches
        weights = m * sum(stages[stage].weight_grad_seconds for stage in on_rank)
        others = m * sum(stages[stage].forward_seconds + stages[stage].input_grad_seconds for stage in on_rank)
        tail = min(tails[stage] for stage in on_rank)
        last = max(weights, tail) if split else weights + tail
        needs[rank] = min(heads[stage] for stage in on_rank) + others + last
    longest = max(*needs, heads[-1] + forwards[-1] + backwards[-1] + tails[-1])
    return _Room(longest, tuple(longest - need for need in needs))


def _totals(seconds: Sequence[float], travels: Sequence[float]) -> list[float]:
    """For each stage, the seconds of one micro-batch on all stages before it, and of the messages from each."""
    return list(accumulate((time + travel for time, travel in zip(seconds, travels)), initial=0.0))


def _reversed(program: Program) -> Program:
    """The same step, reversed in time: the action that produced a token now waits for it. Messages do not queue here,
    because they would queue in another order than in the real step; so no start is later than it must be."""
    travels: dict[int, float] = {
        gives: travel for instructions in program.ranks for _, gives, _, _, travel in instructions if gives != NOTHING
    }

    def back(instruction: Instruction) -> Instruction:
        needs, gives, seconds, _, _ = instruction
        token = needs if needs in travels else NOTHING
        return gives, token, seconds, token, travels.get(token, 0.0)

    ranks = tuple(tuple(map(back, reversed(instructions))) for instructions in program.ranks)
    actions = tuple(tuple(reversed(order)) for order in program.actions)
    return Program(ranks, actions, program.tokens, (), program.tokens)
