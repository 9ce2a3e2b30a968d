"""Idle: the idle seconds of each rank in a step, between its first and its last possible work."""
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from torchckpt.planning.order.program import NOTHING, Instruction, Program, run
from torchckpt.planning.order.schedule import Kind
from torchckpt.planning.step.simulated import Step

__all__ = ["Room", "in_any_order", "in_this_order"]


class Room(NamedTuple):
    """For a step without recomputation: its seconds, and for each rank its idle seconds."""

    step_seconds: float
    seconds: tuple[float, ...]


def in_this_order(step: Step) -> Room:
    """The room of ``step`` in its given order. The head of a rank is the time before its first action; its tail is the
    least time that the step takes after its last action."""
    program, forth, back = step.program, step.run, run(_reversed(step.program))
    rooms = []
    for rank, instructions in enumerate(program.ranks):
        busy = sum(seconds for _, _, seconds, _, _ in instructions)
        ends = forth.starts[rank][0] + back.starts[rank][0] if instructions else 0.0
        rooms.append(max(0.0, forth.step_seconds - ends - busy))
    return Room(forth.step_seconds, tuple(rooms))


def in_any_order(step: Step) -> Room:
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
    return Room(longest, tuple(longest - need for need in needs))


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
