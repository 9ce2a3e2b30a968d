"""Simulator: what a step takes, event by event.

Each rank has one engine, which computes one action at a time and is never taken away from it. Each direction between
two ranks is a wire, which carries one message at a time, in the order in which they were sent. Everything starts as
soon as it can: an action when the one before it on its rank has ended and its input is there, a message when its
sender has ended and the wire is free. What an action waits for stands in
:class:`~torchckpt.model.schedule.schedule.Schedule`.
"""
from __future__ import annotations

from collections.abc import Sequence

from torchckpt.errors import raise_faults
from torchckpt.model.figures import Event, Message
from torchckpt.model.schedule.action import Kind
from torchckpt.model.schedule.costs import Link, StageCosts
from torchckpt.model.schedule.program import compile_program
from torchckpt.model.schedule.run import Run, run
from torchckpt.model.schedule.schedule import Schedule
from torchckpt.model.schedule.validity import check_order, located, stuck
from torchckpt.model.simulation.critical import critical_path
from torchckpt.model.simulation.inputs import per_boundary, per_stage
from torchckpt.model.simulation.memory import curves
from torchckpt.model.simulation.timeline import Timeline

__all__ = ["events_of", "messages_of", "simulate"]

_CALLER = "simulate()"


def simulate(
    schedule: Schedule,
    costs: StageCosts | Sequence[StageCosts] = StageCosts(),  # noqa: B008  # frozen
    link: Link | Sequence[Link] = Link(),  # noqa: B008  # frozen
    *,
    exposed: bool = True,
) -> Timeline:
    """Run ``schedule`` on paper.

    >>> simulate(one_f_one_b(4, 8), StageCosts(forward_seconds=1.0)).step_seconds
    33.0

    Args:
        costs: of every stage, or one per stage.
        link: between any two neighbouring stages on different ranks, or one per pair of neighbouring stages. A message
            is as large as the ``boundary_bytes`` of the later stage, both ways.
        exposed: also find by how much each stage's recomputation lengthens the step. That runs the step once more
            for each stage that recomputes.

    Returns:
        The timeline. Events are in the order of ranks, and of actions on each; messages in the order of the actions
        that sent them. For what memory counts, see :func:`~torchckpt.model.simulation.memory.curves`.

    Raises:
        ArgumentError: costs or links are missing, negative or not numbers; the schedule cannot run.
    """
    check_order(_CALLER, schedule)
    stages, wrong_costs = per_stage(costs, schedule.stages)
    links, wrong_links = per_boundary(link, schedule.stages)
    raise_faults(_CALLER, wrong_costs + wrong_links)
    program = compile_program(schedule, stages, links)
    played = run(program)
    raise_faults(_CALLER, located(stuck(schedule, played)))
    path = critical_path(schedule, program, played)
    del program  # of a large step it is as large as what follows
    return Timeline(
        schedule,
        events_of(schedule, played),
        messages_of(schedule, played),
        curves(schedule, stages, played),
        _exposed(schedule, stages, links, played) if exposed else (),
        path,
    )


def events_of(schedule: Schedule, played: Run) -> tuple[Event, ...]:
    events: list[Event] = []
    for rank, order in enumerate(schedule.ranks):
        events.extend(map(Event, [rank] * len(order), order, played.starts[rank], played.ends[rank]))
    return tuple(events)


def messages_of(schedule: Schedule, played: Run) -> tuple[Message, ...]:
    m, stages = schedule.micro_batches, schedule.stages
    sent, arrived = played.sent, played.arrived
    found = []
    for order in schedule.ranks:
        for action in order:
            stage, kind, i = action
            if kind is Kind.FORWARD:
                to_stage = stage + 1
                token = to_stage * m + i
            elif kind is Kind.BACKWARD or kind is Kind.INPUT_GRAD:
                to_stage = stage - 1
                token = (stages + to_stage) * m + i
            else:
                continue
            if 0 <= to_stage < stages and sent[token] >= 0.0:
                found.append(Message(action, to_stage, sent[token], arrived[token]))
    return tuple(found)


def _exposed(
    schedule: Schedule, costs: Sequence[StageCosts], links: Sequence[Link], played: Run
) -> tuple[float, ...]:
    """Per stage: the step, less the same step where the recomputation of that stage takes no time."""
    recomputing = {stage for order in schedule.ranks for stage, kind, _ in order if kind is Kind.RECOMPUTE}
    step = played.step_seconds
    found = [0.0] * schedule.stages
    for stage in recomputing:
        found[stage] = step - run(compile_program(schedule, costs, links, free=stage)).step_seconds
    return tuple(found)
