"""Program: a schedule compiled to numbers: what each action waits for, how long it takes, what it sends."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torchckpt.planning.order.orders import Visit
from torchckpt.planning.order.schedule import Action, Kind, Schedule

__all__ = ["NOTHING", "Instruction", "Program", "Run", "compile_program", "run"]

NOTHING = -1
"""Stands for "no token" or "no wire" in an instruction."""

Instruction: TypeAlias = tuple[int, int, float, int, float]
"""One action: the token that it waits for, the token that it produces, its seconds, the wire on which the produced
token travels, and the seconds of that travel."""


@dataclass(frozen=True)
class Program:
    """Instructions for every rank. A token is an input of one stage for one micro-batch: the number
    ``stage * m + micro_batch`` is the activation; with ``stages * m`` added, it is the gradient. A wire is one
    direction between two ranks."""

    ranks: tuple[tuple[Instruction, ...], ...]
    actions: tuple[tuple[Action, ...], ...]
    """For each rank, the action of each instruction. A late recompute is an ``R`` of its own right before its backward,
    which waits for the gradient."""
    tokens: int
    given: tuple[int, ...]
    """The tokens that exist from the start: the inputs of the first stage, and the gradients of the last stage."""
    wires: int


def _no_time(action: Action) -> float:
    return 0.0


def compile_program(
    schedule: Schedule,
    seconds: Callable[[Action], float] = _no_time,
    travel_seconds: Sequence[float] | None = None,
    late_seconds: Mapping[Visit, float] | None = None,
) -> Program:
    """Compile ``schedule``.

    Args:
        seconds: of an action, without late recomputes.
        travel_seconds: for each pair of neighbouring stages, the seconds of a message. Default: 0.
        late_seconds: for each visit that recomputes inside its backward, the seconds of that. Default: none does.
    """
    m, stages, placement = schedule.micro_batches, schedule.stages, schedule.placement
    late, travels = late_seconds or {}, travel_seconds or [0.0] * (stages - 1)
    wires: dict[tuple[int, int], int] = {}
    down = [_wire(wires, placement, stage, stage + 1) for stage in range(stages)]
    up = [_wire(wires, placement, stage, stage - 1) for stage in range(stages)]
    ranks, actions = [], []
    for order in schedule.ranks:
        instructions: list[Instruction] = []
        expanded: list[Action] = []
        append = instructions.append
        for action in order:
            stage, kind, i = action
            key = stage * m + i
            if kind is Kind.FORWARD:
                gives = key + m if stage < stages - 1 else NOTHING
                append((key, gives, seconds(action), down[stage], travels[stage] if down[stage] >= 0 else 0.0))
            elif kind is Kind.BACKWARD or kind is Kind.INPUT_GRAD:
                needs = key + stages * m
                if late and (stage, i) in late:
                    append((needs, NOTHING, late[stage, i], NOTHING, 0.0))
                    expanded.append(Action(stage, Kind.RECOMPUTE, i))
                gives = key + (stages - 1) * m if stage else NOTHING
                append((needs, gives, seconds(action), up[stage], travels[stage - 1] if up[stage] >= 0 else 0.0))
            else:
                append((NOTHING, NOTHING, seconds(action), NOTHING, 0.0))
            expanded.append(action)
        ranks.append(tuple(instructions))
        actions.append(tuple(expanded) if late else order)
    given = (*range(m), *range((2 * stages - 1) * m, 2 * stages * m))
    return Program(tuple(ranks), tuple(actions), 2 * stages * m, given, len(wires))


def _wire(wires: dict[tuple[int, int], int], placement: Sequence[int], stage: int, other: int) -> int:
    """The number of the wire from ``stage`` to ``other``; none if they are on one rank, or there is no other."""
    if not 0 <= other < len(placement) or placement[stage] == placement[other]:
        return NOTHING
    return wires.setdefault((placement[stage], placement[other]), len(wires))


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
