"""Critical path: the chain of actions and messages that determines the length of a step."""
from __future__ import annotations

from torchckpt.model.figures import Event, Message
from torchckpt.model.schedule.action import Action
from torchckpt.model.schedule.program import NOTHING, Program
from torchckpt.model.schedule.run import Run
from torchckpt.model.schedule.schedule import Schedule

__all__ = ["critical_path"]


def critical_path(schedule: Schedule, program: Program, played: Run) -> tuple[Event | Message, ...]:
    """The critical path, from the start of the step to its end; each entry begins when the previous entry ends.

    If the rank became free and the input arrived at the same moment, the path follows the rank.
    """
    giver = _givers(program)
    rank = max(range(len(played.ends)), key=lambda rank: played.ends[rank][-1:], default=0)
    position = len(played.ends[rank]) - 1
    path: list[Event | Message] = []
    while position >= 0:
        start, end = played.starts[rank][position], played.ends[rank][position]
        path.append(Event(rank, program.actions[rank][position], start, end))
        if start == 0.0 or (position and played.ends[rank][position - 1] == start):
            position = position - 1 if start else NOTHING
            continue
        token = program.ranks[rank][position][0]
        rank, position = giver[token]
        path.append(_message(schedule, program.actions[rank][position], played, token))
        while played.sent[token] > played.ends[rank][position]:
            position = _before_on_wire(program, rank, position)
            token = program.ranks[rank][position][1]
            path.append(_message(schedule, program.actions[rank][position], played, token))
    return tuple(reversed(path))


def _givers(program: Program) -> list[tuple[int, int]]:
    """For each token, the rank and the position of the action that produces it."""
    givers = [(NOTHING, NOTHING)] * program.tokens
    for rank, instructions in enumerate(program.ranks):
        for position, (_, gives, _, wire, _) in enumerate(instructions):
            if wire >= 0:
                givers[gives] = rank, position
    return givers


def _message(schedule: Schedule, action: Action, played: Run, token: int) -> Message:
    to_stage = token // schedule.micro_batches % schedule.stages
    return Message(action, to_stage, played.sent[token], played.arrived[token])


def _before_on_wire(program: Program, rank: int, position: int) -> int:
    """The position of the previous action of this rank that sent on the same wire."""
    instructions = program.ranks[rank]
    wire = instructions[position][3]
    return next(before for before in range(position - 1, NOTHING, -1) if instructions[before][3] == wire)
