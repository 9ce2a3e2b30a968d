"""Run: simulate a program once; every action starts as soon as its rank is free and its input has arrived."""
from __future__ import annotations

from dataclasses import dataclass

from torchckpt.model.schedule.program import NOTHING, Program

__all__ = ["Run", "run"]


@dataclass(frozen=True)
class Run:
    """When everything happened, in seconds: for each rank and action, and for each token (``NaN`` if never sent)."""

    starts: list[list[float]]
    ends: list[list[float]]
    sent: list[float]
    arrived: list[float]
    stuck: tuple[int, ...] = ()
    """The ranks that wait forever, for an input that never arrives."""

    @property
    def step_seconds(self) -> float:
        return max((ends[-1] for ends in self.ends if ends), default=0.0)


def run(program: Program) -> Run:
    """Simulate ``program``. Each rank runs until it needs a token that does not exist yet, and continues when the token
    is produced. The work is linear in the number of actions. Messages on a wire queue in the sender's order."""
    absent = -1.0
    arrived = [absent] * program.tokens
    sent = [absent] * program.tokens
    for token in program.given:
        arrived[token] = 0.0
    wire_free = [0.0] * program.wires
    starts: list[list[float]] = [[] for _ in program.ranks]
    ends: list[list[float]] = [[] for _ in program.ranks]
    clocks = [0.0] * len(program.ranks)
    rest = [iter(instructions) for instructions in program.ranks]
    blocked: list[tuple[int, int, float, int, float] | None] = [None] * len(program.ranks)
    waiting: dict[int, int] = {}
    ready = list(reversed(range(len(program.ranks))))
    while ready:
        rank = ready.pop()
        clock = clocks[rank]
        start_at, end_at = starts[rank].append, ends[rank].append
        instructions = rest[rank]
        instruction = blocked[rank] or next(instructions, None)
        while instruction is not None:
            needs, gives, seconds, wire, travel = instruction
            if needs >= 0:
                there = arrived[needs]
                if there < 0.0:
                    waiting[needs] = rank
                    blocked[rank] = instruction
                    clocks[rank] = clock
                    break
                if there > clock:
                    clock = there
            start_at(clock)
            clock += seconds
            end_at(clock)
            if gives >= 0:
                if wire == NOTHING:
                    arrived[gives] = clock
                else:
                    leaves = wire_free[wire]
                    if leaves < clock:
                        leaves = clock
                    sent[gives] = leaves
                    arrived[gives] = wire_free[wire] = leaves + travel
                if gives in waiting:
                    ready.append(waiting.pop(gives))
            instruction = next(instructions, None)
    return Run(starts, ends, sent, arrived, tuple(sorted(waiting.values())))
