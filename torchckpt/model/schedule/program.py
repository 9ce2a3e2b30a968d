"""Program: a schedule compiled to numbers: what each action waits for, how long it takes, what it sends."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torchckpt.model.schedule.action import Action, Kind
from torchckpt.model.schedule.orders import Visit
from torchckpt.model.schedule.schedule import Schedule

__all__ = ["NOTHING", "Instruction", "Program", "compile_program"]

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
