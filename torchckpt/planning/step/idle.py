"""Idle: the idle seconds of each rank in a step, between its first and its last possible work."""
from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from torchckpt.planning.order.program import NOTHING, Instruction, Program, run
from torchckpt.planning.order.schedule import Kind
from torchckpt.planning.step.simulated import Step
from torchckpt.planning.work.block import Stage

__all__ = ["Room", "in_any_order", "in_this_order"]


@dataclass(frozen=True)
class Room:
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
    split = any(kind is Kind.INPUT_GRAD for order in step.schedule.ranks for _, kind, _ in order)
    journey = _Journey.of(step, split)
    needs = [journey.needed_by(rank, step, split) for rank in range(len(step.schedule.ranks))]
    longest = max(*needs, journey.seconds)
    return Room(longest, tuple(longest - need for need in needs))


@dataclass(frozen=True)
class _Journey:
    """One micro-batch: for each stage, the seconds to reach it in the forward, and to leave it in the backward."""

    down: list[float]
    up: list[float]
    seconds: float

    @classmethod
    def of(cls, step: Step, split: bool) -> _Journey:
        placement, stages = step.schedule.placement, step.stages
        pairs = zip(step.travel_seconds, placement, placement[1:])
        travels = [0.0 if here == there else seconds for seconds, here, there in pairs]
        backwards = [_backward_seconds(stage, split) for stage in stages]
        down = accumulate((stage.forward_seconds + travel for stage, travel in zip(stages, travels)), initial=0.0)
        up = accumulate((seconds + travel for seconds, travel in zip(backwards, travels)), initial=0.0)
        downs, ups = list(down), list(up)
        return cls(downs, ups, downs[-1] + stages[-1].forward_seconds + backwards[-1] + ups[-1])

    def needed_by(self, rank: int, step: Step, split: bool) -> float:
        """The least seconds of a step, given the work of this rank."""
        stages = [stage for stage, home in enumerate(step.schedule.placement) if home == rank]
        if not stages:
            return 0.0
        m = step.schedule.micro_batches
        weights = m * sum(step.stages[stage].weight_grad_seconds for stage in stages)
        others = m * sum(step.stages[stage].forward_seconds + step.stages[stage].input_grad_seconds for stage in stages)
        head, tail = min(self.down[stage] for stage in stages), min(self.up[stage] for stage in stages)
        return head + others + (max(weights, tail) if split else weights + tail)


def _backward_seconds(stage: Stage, split: bool) -> float:
    return stage.input_grad_seconds + (0.0 if split else stage.weight_grad_seconds)


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
