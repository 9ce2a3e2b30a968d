"""Idle: the idle seconds of each rank in a step, between its first and its last possible work."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torchckpt.model.schedule.action import Kind
from torchckpt.model.schedule.costs import Link, StageCosts
from torchckpt.model.schedule.program import NOTHING, Instruction, Program, compile_program, travel_seconds
from torchckpt.model.schedule.run import run
from torchckpt.model.schedule.schedule import Schedule

__all__ = ["Room", "in_any_order", "in_this_order"]


@dataclass(frozen=True)
class Room:
    """For a schedule without recomputation: the seconds of the step, and for each rank its idle seconds."""

    step_seconds: float
    seconds: tuple[float, ...]


def in_this_order(schedule: Schedule, costs: Sequence[StageCosts], links: Sequence[Link]) -> Room:
    """The room of ``schedule`` in its given order. The head of a rank is the time before its first action; its tail is
    the least time that the step takes after its last action."""
    program = compile_program(schedule, costs, links)
    forth, back = run(program), run(_reversed(program))
    step = forth.step_seconds
    rooms = []
    for rank, instructions in enumerate(program.ranks):
        busy = sum(seconds for _, _, seconds, _, _ in instructions)
        ends = forth.starts[rank][0] + back.starts[rank][0] if instructions else 0.0
        rooms.append(max(0.0, step - ends - busy))
    return Room(step, tuple(rooms))


def in_any_order(schedule: Schedule, costs: Sequence[StageCosts], links: Sequence[Link]) -> Room:
    """The room of ``schedule`` if its actions could run in any order. The step is at least as long as the time that one
    rank needs, and as the time that one micro-batch needs; the longest of these is taken.

    If backwards are split, a rank may run its weight gradients last, while other ranks still send gradients back.
    """
    split = any(kind is Kind.INPUT_GRAD for order in schedule.ranks for _, kind, _ in order)
    journey = _Journey.of(schedule, costs, links, split)
    needs = [journey.needed_by(rank, schedule, costs, split) for rank in range(len(schedule.ranks))]
    step = max(*needs, journey.seconds)
    return Room(step, tuple(step - need for need in needs))


@dataclass(frozen=True)
class _Journey:
    """One micro-batch: for each stage, the seconds to reach it in the forward, and to leave it in the backward."""

    down: list[float]
    up: list[float]
    seconds: float

    @classmethod
    def of(cls, schedule: Schedule, costs: Sequence[StageCosts], links: Sequence[Link], split: bool) -> _Journey:
        travels = [travel_seconds(schedule, costs, links, lower) for lower in range(len(links))]
        backwards = [own.input_grad_seconds + (0.0 if split else own.weight_grad_seconds) for own in costs]
        down = accumulate((own.forward_seconds + travel for own, travel in zip(costs, travels)), initial=0.0)
        up = accumulate((seconds + travel for seconds, travel in zip(backwards, travels)), initial=0.0)
        downs, ups = list(down), list(up)
        return cls(downs, ups, downs[-1] + costs[-1].forward_seconds + backwards[-1] + ups[-1])

    def needed_by(self, rank: int, schedule: Schedule, costs: Sequence[StageCosts], split: bool) -> float:
        """The least seconds of a step, given the work of this rank."""
        own = [stage for stage, there in enumerate(schedule.placement) if there == rank]
        if not own:
            return 0.0
        m = schedule.micro_batches
        weights = m * sum(costs[stage].weight_grad_seconds for stage in own)
        others = m * sum(costs[stage].forward_seconds + costs[stage].input_grad_seconds for stage in own)
        head, tail = min(self.down[stage] for stage in own), min(self.up[stage] for stage in own)
        return head + others + (max(weights, tail) if split else weights + tail)


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
    return Program(ranks, program.tokens, (), program.tokens)
