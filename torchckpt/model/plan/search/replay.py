"""Replay: simulate a step whose order is fixed, with the seconds and the bytes of each action."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from torchckpt.model.plan.stage.holding import use_bytes
from torchckpt.model.plan.stage.stage import Stage
from torchckpt.model.schedule.action import Action, Kind
from torchckpt.model.schedule.costs import Link
from torchckpt.model.schedule.orders import Visit
from torchckpt.model.schedule.program import Program, compile_program
from torchckpt.model.schedule.run import Run, run
from torchckpt.model.schedule.schedule import Schedule
from torchckpt.model.simulation.simulator import events_of, messages_of
from torchckpt.model.simulation.timeline import Timeline

__all__ = ["Choice", "Choices", "Level", "first_dropped", "levels", "memory_of", "replay", "without_weight_grads"]

_Step: TypeAlias = tuple[float, float]
"""The bytes that an action allocates when it starts, and those that it frees when it ends."""


@dataclass(frozen=True)
class Choice:
    """The blocks of one visit, by index: kept, recomputed early, or recomputed late. Each block is in one tuple."""

    kept: tuple[int, ...]
    early: tuple[int, ...] = ()
    """Recomputed by an ``R`` action, before the backward."""
    late: tuple[int, ...] = ()
    """Recomputed inside the backward."""

    def __str__(self) -> str:
        return f"{len(self.kept)}/{len(self.early)}/{len(self.late)}"


Choices: TypeAlias = Mapping[Visit, Choice]


def first_dropped(schedule: Schedule, stages: Sequence[Stage], blocks: int) -> Choices:
    """For every visit: the first ``blocks`` of its stage are recomputed inside the backward, the others are kept."""
    counts = [(min(blocks, len(stage.blocks)), len(stage.blocks)) for stage in stages]
    each = [Choice(tuple(range(late, count)), (), tuple(range(late))) for late, count in counts]
    return {(stage, i): each[stage] for stage in range(schedule.stages) for i in range(schedule.micro_batches)}


def without_weight_grads(schedule: Schedule) -> Schedule:
    """``schedule`` with its ``W`` actions removed."""
    ranks = (tuple(action for action in order if action.kind is not Kind.WEIGHT_GRAD) for order in schedule.ranks)
    return replace(schedule, ranks=tuple(ranks))


def replay(schedule: Schedule, stages: Sequence[Stage], links: Sequence[Link], choices: Choices) -> Timeline:
    """Simulate the step of ``schedule``, which has an ``R`` for every visit with early blocks.

    Memory is without static bytes. A whole backward counts with its peak from its start to its end.
    """
    program = _program(schedule, stages, links, choices)
    played = run(program)
    memory = memory_of(schedule, stages, choices, played)
    return Timeline(schedule, events_of(schedule, played), messages_of(schedule, played), memory)


def memory_of(
    schedule: Schedule, stages: Sequence[Stage], choices: Choices, played: Run
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """For each rank, pairs of a time and the bytes alive from then on. ``played`` has simulated or measured times."""
    return tuple(_curve(order, stages, choices, played, rank) for rank, order in enumerate(schedule.ranks))


class Level(NamedTuple):
    """Bytes of a rank during one action, and after it."""

    highest: float
    """The most during the action."""
    left: float
    """When the action has ended."""
    entered: float = 0.0
    """If measured: during a backward, the most before it recomputes anything."""


def levels(order: Sequence[Action], stages: Sequence[Stage], choices: Choices) -> list[Level]:
    """The level of each action of one rank."""
    found, alive = [], 0.0
    for action in order:
        takes, frees = _changes(action.kind, stages[action.stage], choices[action.stage, action.micro_batch])
        highest, alive = alive + takes, alive + takes - frees
        found.append(Level(highest, alive))
    return found


def _program(schedule: Schedule, stages: Sequence[Stage], links: Sequence[Link], choices: Choices) -> Program:
    plain = compile_program(schedule, [stage.costs() for stage in stages], links)
    ranks = []
    for order, instructions in zip(schedule.ranks, plain.ranks):
        own = []
        for (stage, kind, i), (needs, gives, seconds, wire, travel) in zip(order, instructions):
            blocks, choice = stages[stage].blocks, choices[stage, i]
            if kind is Kind.RECOMPUTE:
                seconds = sum(blocks[at].recompute_seconds for at in choice.early)
            elif kind is Kind.BACKWARD or kind is Kind.INPUT_GRAD:
                seconds += sum(blocks[at].recompute_seconds for at in choice.late)
            own.append((needs, gives, seconds, wire, travel))
        ranks.append(tuple(own))
    return Program(tuple(ranks), plain.tokens, plain.given, plain.wires)


def _curve(
    order: Sequence[Action], stages: Sequence[Stage], choices: Choices, played: Run, rank: int
) -> tuple[tuple[float, float], ...]:
    alive, curve = 0.0, [(0.0, 0.0)]
    for action, start, end in zip(order, played.starts[rank], played.ends[rank]):
        takes, frees = _changes(action.kind, stages[action.stage], choices[action.stage, action.micro_batch])
        alive += takes
        curve.append((start, alive))
        if frees:
            alive -= frees
            curve.append((end, alive))
    return tuple(curve)


def _changes(kind: Kind, stage: Stage, choice: Choice) -> _Step:
    blocks = stage.blocks
    early = sum(blocks[at].freed_bytes for at in choice.early)
    late = sum(blocks[at].freed_bytes for at in choice.late)
    held = stage.saved_bytes - early - late
    if kind is Kind.FORWARD:
        return held, 0.0
    if kind is Kind.RECOMPUTE:
        return early, 0.0
    if kind is Kind.INPUT_GRAD:
        return late, 0.0
    if kind is Kind.WEIGHT_GRAD:
        return 0.0, stage.saved_bytes
    highest = use_bytes(stage, choice.late)
    return highest - held - early, highest
