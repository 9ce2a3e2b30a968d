"""Program: a schedule compiled to numbers, and two ways to run it.

:func:`run` is for ranks whose order is given. :func:`run_deciding` is for ranks that decide as time goes by; it needs a
queue of events, and takes several times as long.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Any, Protocol, TypeAlias

from torchckpt.planning.order.schedule import Action, Kind, Schedule, Visit

__all__ = ["NOTHING", "Deciding", "Instruction", "Program", "Run", "compile_program", "run", "run_deciding"]

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
    initial: tuple[int, ...]
    """The tokens that exist from the start: the inputs of the first stage, and the gradients of the last stage."""
    wires: int

    @cached_property
    def senders(self) -> dict[int, tuple[int, int]]:
        """By token, the rank and the position of the instruction that produces it."""
        places = ((rank, place, each[1]) for rank, row in enumerate(self.ranks) for place, each in enumerate(row))
        return {gives: (rank, place) for rank, place, gives in places if gives >= 0}


_ABSENT = -1.0
"""The arrival of a token that was not sent."""
_FOREVER = float("inf")


def compile_program(
    schedule: Schedule,
    seconds: Callable[[Action], float] = lambda _: 0.0,
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
    initial = (*range(m), *range((2 * stages - 1) * m, 2 * stages * m))
    return Program(tuple(ranks), tuple(actions), 2 * stages * m, initial, len(wires))


def _wire(wires: dict[tuple[int, int], int], placement: Sequence[int], stage: int, other: int) -> int:
    """The number of the wire from ``stage`` to ``other``; none if they are on one rank, or there is no other."""
    if not 0 <= other < len(placement) or placement[stage] == placement[other]:
        return NOTHING
    return wires.setdefault((placement[stage], placement[other]), len(wires))


@dataclass(frozen=True)
class Run:
    """The times of a program, in seconds: for each rank and action, and for each token (-1 if it was never sent)."""

    starts: list[list[float]]
    ends: list[list[float]]
    sent: list[float]
    arrived: list[float]
    stuck: tuple[int, ...] = ()
    """The ranks that wait forever, for an input that never arrives."""

    @property
    def step_seconds(self) -> float:
        return max((ends[-1] for ends in self.ends if ends), default=0.0)


def run(program: Program, end_seconds: Sequence[Callable[[float], float] | None] | None = None) -> Run:
    """Simulate ``program``. Each rank runs until it needs a token that does not exist yet, and continues when the token
    is produced. The work is linear in the number of actions. Messages on a wire queue in the sender's order.
    ``end_seconds``: for each rank, a function from the start of its next action to its end; it may know of engines
    beside the compute. Default, also for a rank: the start plus the seconds of the instruction.
    """
    arrived, sent = [_ABSENT] * program.tokens, [_ABSENT] * program.tokens
    for token in program.initial:
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
        clock, end_of = clocks[rank], end_seconds[rank] if end_seconds else None
        start_at, end_at = starts[rank].append, ends[rank].append
        instructions = rest[rank]
        instruction = blocked[rank] or next(instructions, None)
        while instruction is not None:
            needs, gives, seconds, wire, travel = instruction
            if needs >= 0:
                arrival = arrived[needs]
                if arrival < 0.0:
                    waiting[needs] = rank
                    blocked[rank] = instruction
                    clocks[rank] = clock
                    break
                if arrival > clock:
                    clock = arrival
            start_at(clock)
            clock = end_of(clock) if end_of else clock + seconds
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


class Deciding(Protocol):
    """A rank that decides what to run next whenever it is free. What a decision is, it alone knows."""

    place: int
    """The next instruction of its program; what else it runs, it inserts."""
    left_seconds: float
    """The least seconds that it still has to run."""
    done: list[Any]
    """The actions that it ran, in this order."""

    def next_in_order(self) -> Any:
        """Decide when the input of the next instruction is there: for that, or for what has to be done before it."""

    def while_idle(self, idle_seconds: float) -> Any | None:
        """Decide when that input will not be there for at least ``idle_seconds``; None to wait for it."""

    def run(self, decision: Any, now: float, awaited: int) -> float:
        """Run what was decided, which waited for the token ``awaited``. Returns when it ends."""


def run_deciding(
    program: Program,
    ranks: Sequence[Deciding],
    expected: Sequence[float] = (),
    limit_seconds: float = _FOREVER,
) -> tuple[list[float], dict[int, tuple[int, int]]] | None:
    """Run ``program`` on ranks that decide. A running action is never interrupted.

    Args:
        expected: when each token is expected to arrive; a rank that idles is told so. Default: not known.
        limit_seconds: the simulation stops when the step must take longer. Default: never.

    Returns:
        when each token arrived; and for each token that was sent the rank, and the place in ``done`` of the action that
        sent it. None if the step takes longer than its limit.
    """
    arrived = [_ABSENT] * program.tokens
    for token in program.initial:
        arrived[token] = 0.0
    wire_free = [0.0] * program.wires
    senders: dict[int, tuple[int, int]] = {}
    blocked: dict[int, tuple[int, float]] = {}  # by token, the rank that waits for it, and since when
    agenda = [(0.0, rank) for rank in range(len(ranks))]
    while agenda:
        now, number = heappop(agenda)
        rank, instructions = ranks[number], program.ranks[number]
        last = len(instructions)
        while (place := rank.place) < last:
            token, gives, _, wire, travel = instructions[place]
            arrival = 0.0 if token < 0 else arrived[token]
            if 0.0 <= arrival <= now:
                decision = rank.next_in_order()
            else:
                until = expected[token] if expected and arrival < 0.0 else arrival
                decision = rank.while_idle(until - now if until > now else _FOREVER)
            if decision is None:
                if arrival < 0.0:
                    blocked[token] = number, now
                else:
                    heappush(agenda, (arrival, number))
                break
            now = rank.run(decision, now, token if arrival == now else NOTHING)
            if now + rank.left_seconds > limit_seconds:
                return None
            if gives >= 0 and rank.place > place:
                arrival = now
                if wire >= 0:
                    free = wire_free[wire]
                    arrival = wire_free[wire] = (free if free > now else now) + travel
                arrived[gives] = arrival
                senders[gives] = number, len(rank.done) - 1
                if gives in blocked:
                    waiter, since = blocked.pop(gives)
                    heappush(agenda, (arrival if arrival > since else since, waiter))
            if agenda and agenda[0][0] <= now:  # another rank comes first
                heappush(agenda, (now, number))
                break
        else:
            while (decision := rank.while_idle(_FOREVER)) is not None:
                now = rank.run(decision, now, NOTHING)
    return arrived, senders
