"""Simulator: what a step takes, event by event."""
from __future__ import annotations

from collections.abc import Sequence

from torchckpt.model.action import Kind
from torchckpt.model.costs import Link, StageCosts
from torchckpt.model.memory import curves
from torchckpt.model.program import compile_program
from torchckpt.model.run import Run, run
from torchckpt.model.schedule import Schedule
from torchckpt.model.timeline import Event, Message, Timeline

__all__ = ["simulate"]


def simulate(
    schedule: Schedule,
    costs: StageCosts | Sequence[StageCosts] = StageCosts(),  # noqa: B008  # frozen
    link: Link | Sequence[Link] = Link(),  # noqa: B008  # frozen
    *,
    exposed: bool = True,
) -> Timeline:
    """Run ``schedule`` on paper.

    Args:
        costs: of every stage, or one per stage.
        link: between all neighbouring stages, or one per pair of them.
        exposed: also find by how much each stage's recomputation lengthens the step; runs the step once more for each
            stage that recomputes.
    """
    costs = [costs] * schedule.stages if isinstance(costs, StageCosts) else list(costs)
    links = [link] * (schedule.stages - 1) if isinstance(link, Link) else list(link)
    program = compile_program(schedule, costs, links)
    played = run(program)
    return Timeline(
        schedule,
        _events(schedule, played),
        _messages(schedule, played),
        curves(schedule, costs, played),
        (),
        (),
    )


def _events(schedule: Schedule, played: Run) -> tuple[Event, ...]:
    return tuple(
        event
        for rank, order in enumerate(schedule.ranks)
        for event in map(Event, [rank] * len(order), order, played.starts[rank], played.ends[rank])
    )


def _messages(schedule: Schedule, played: Run) -> tuple[Message, ...]:
    """In the order of the ranks and actions that sent them."""
    m, stages = schedule.micro_batches, schedule.stages
    sent, arrived = played.sent, played.arrived
    found = []
    for order in schedule.ranks:
        for action in order:
            stage, kind, i = action
            if kind is Kind.FORWARD:
                token, to_stage = (stage + 1) * m + i, stage + 1
            elif kind is Kind.BACKWARD or kind is Kind.INPUT_GRAD:
                token, to_stage = (stages + stage - 1) * m + i, stage - 1
            else:
                continue
            if 0 <= to_stage < stages and sent[token] >= 0.0:
                found.append(Message(action, to_stage, sent[token], arrived[token]))
    return tuple(found)
