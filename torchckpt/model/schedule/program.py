"""Program: a schedule and its costs, compiled to numbers for the simulator."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torchckpt.model.schedule.action import Kind
from torchckpt.model.schedule.costs import Link, StageCosts
from torchckpt.model.schedule.schedule import Schedule, Segments

__all__ = ["NOTHING", "Instruction", "Program", "compile_program", "recomputed_keys", "travel_seconds"]

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
    tokens: int
    given: tuple[int, ...]
    """The tokens that exist from the start: the inputs of the first stage, and the gradients of the last stage."""
    wires: int


def compile_program(
    schedule: Schedule, costs: Sequence[StageCosts], links: Sequence[Link], free: int = NOTHING
) -> Program:
    """Compile ``schedule`` for the simulator.

    Args:
        costs: one for each stage.
        links: one for each pair of neighbouring stages.
        free: a stage whose recomputation takes no time. Default: none.
    """
    m, stages = schedule.micro_batches, schedule.stages
    tables = [_Table.of(schedule, costs, links, stage, free) for stage in range(stages)]
    late = bytearray(stages * m)
    for stage, i in schedule.late:
        late[stage * m + i] = 1
    wires: dict[tuple[int, int], int] = {}
    for table in tables:
        table.number_wires(wires, schedule.placement)
    recomputed = recomputed_keys(schedule) if any(table.rest for table in tables) else None
    ranks = []
    for order in schedule.ranks:
        instructions: list[Instruction] = []
        append = instructions.append
        for stage, kind, i in order:
            table = tables[stage]
            key = stage * m + i
            if kind is Kind.FORWARD:
                gives = key + m if table.sends_activations else NOTHING
                append((key, gives, table.forward, table.activation_wire, table.activation_seconds))
            elif kind is Kind.BACKWARD or kind is Kind.INPUT_GRAD:
                seconds = table.backward if kind is Kind.BACKWARD else table.input_grad
                if recomputed is not None and recomputed[key]:
                    seconds += table.rest
                gives = key + (stages - 1) * m if stage else NOTHING
                append((key + stages * m, gives, seconds, table.gradient_wire, table.gradient_seconds))
            elif kind is Kind.WEIGHT_GRAD:
                append((NOTHING, NOTHING, table.weight_grad, NOTHING, 0.0))
            else:
                append((key + stages * m if late[key] else NOTHING, NOTHING, table.recompute, NOTHING, 0.0))
        ranks.append(tuple(instructions))
    given = (*range(m), *range((2 * stages - 1) * m, 2 * stages * m))
    return Program(tuple(ranks), 2 * stages * m, given, len(wires))


@dataclass
class _Table:
    """The numbers of one stage."""

    stage: int
    last: int
    forward: float
    backward: float
    input_grad: float
    weight_grad: float
    recompute: float
    rest: float
    activation_seconds: float
    gradient_seconds: float
    activation_wire: int = NOTHING
    gradient_wire: int = NOTHING

    @classmethod
    def of(
        cls, schedule: Schedule, costs: Sequence[StageCosts], links: Sequence[Link], stage: int, free: int
    ) -> _Table:
        own, last = costs[stage], schedule.stages - 1
        segments = schedule.segments[stage] if schedule.segments else Segments()
        recompute = 0.0 if stage == free else own.recompute_seconds
        return cls(
            stage,
            last,
            own.forward_seconds,
            own.input_grad_seconds + own.weight_grad_seconds,
            own.input_grad_seconds,
            own.weight_grad_seconds,
            recompute * segments.early / segments.total,
            recompute * (segments.total - segments.early) / segments.total,
            travel_seconds(schedule, costs, links, stage) if stage < last else 0.0,
            travel_seconds(schedule, costs, links, stage - 1) if stage else 0.0,
        )

    @property
    def sends_activations(self) -> bool:
        return self.stage < self.last

    def number_wires(self, wires: dict[tuple[int, int], int], placement: Sequence[int]) -> None:
        here = placement[self.stage]
        if self.stage < self.last and placement[self.stage + 1] != here:
            self.activation_wire = wires.setdefault((here, placement[self.stage + 1]), len(wires))
        if self.stage and placement[self.stage - 1] != here:
            self.gradient_wire = wires.setdefault((here, placement[self.stage - 1]), len(wires))


def travel_seconds(schedule: Schedule, costs: Sequence[StageCosts], links: Sequence[Link], lower: int) -> float:
    """Seconds of a message between stage ``lower`` and the next stage; 0 if both are on one rank."""
    if schedule.placement[lower] == schedule.placement[lower + 1]:
        return 0.0
    return links[lower].latency_seconds + costs[lower + 1].boundary_bytes / links[lower].bandwidth


def recomputed_keys(schedule: Schedule) -> bytearray:
    """1 at ``stage * m + micro_batch`` where the schedule recomputes, else 0."""
    found = bytearray(schedule.stages * schedule.micro_batches)
    for order in schedule.ranks:
        for stage, kind, i in order:
            if kind is Kind.RECOMPUTE:
                found[stage * schedule.micro_batches + i] = 1
    return found
