"""Observed: when each stage ran which action on simulated devices, in the types of ``torchckpt.planning``.

``Marked`` leaves operators of no duration on the stream where something of its stage begins or ends, and they stand in
the record of the device between those of the model:

    floor_ forward's operators ceil_ ┄┄ floor_ those of the replay ceil_ ┄┄ trunc_ those of the backward

A replay that is late stands inside of a backward.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from tests.device import Ran
from torchckpt.planning import Action, Event, Kind, Message, Schedule, Timeline

__all__ = ["MARKS", "Marked", "busy_seconds", "done_by", "step_seconds", "timeline_of"]

_BEGIN, _END, _BACK = "aten::floor_", "aten::ceil_", "aten::trunc_"
MARKS = dict.fromkeys((_BEGIN, _END, _BACK), 0.0)
"""Seconds of the operators that mark the start of an action, for ``sim.durations``."""
_COPY = "aten::copy_"
_NEAR_SECONDS = 1e-6

Done = list[tuple[Action, list[Ran]]]


class Marked(nn.Module):
    """A stage that marks the start of its forward, its replay and its backward."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self._spots: dict[torch.device, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self._mark(torch.floor_, x.device)
        try:
            y: Tensor = self.stage(x)
        finally:  # a replay stops early, by an exception
            self._mark(torch.ceil_, x.device)
        if y.requires_grad:
            y.register_hook(lambda grad: self._mark(torch.trunc_, grad.device))
        return y

    def _mark(self, operator: Callable[[Tensor], Tensor], device: torch.device) -> None:
        if device.type != "sim":
            return
        if device not in self._spots:
            self._spots[device] = torch.zeros(1, device=device)
        with torch.no_grad():
            operator(self._spots[device])


def step_seconds(ran: Sequence[Ran]) -> float:
    """Seconds from the first start to the last end, over all devices."""
    return max(one.end_seconds for one in ran) - min(one.start_seconds for one in ran)


def busy_seconds(done: Done) -> dict[Kind, float]:
    """Seconds of operators, added up by kind of action."""
    found: dict[Kind, float] = defaultdict(float)
    for action, ran in done:
        found[action.kind] += sum(one.end_seconds - one.start_seconds for one in ran)
    return found


def timeline_of(schedule: Schedule, ran: Sequence[Ran]) -> Timeline:
    """A step of one stage on each device, that began with the first operator."""
    first = min(one.start_seconds for one in ran)
    ran = [one._replace(start_seconds=one.start_seconds - first, end_seconds=one.end_seconds - first) for one in ran]
    events, messages = [], []
    for stage in range(schedule.stages):
        here = [one for one in ran if one.device == stage]
        done = done_by(stage, schedule, [one for one in here if one.stream == 0])
        own = [Event(stage, action, each[0].start_seconds, each[-1].end_seconds) for action, each in done if each]
        events.extend(own)
        copies = [one for one in here if one.stream != 0 and one.operator == _COPY]
        messages.extend(_messages(own, copies, schedule.stages))
    return Timeline(schedule, tuple(events), tuple(messages), ((),) * schedule.stages)


def done_by(stage: int, schedule: Schedule, ran: Iterable[Ran]) -> Done:
    """The actions of ``stage`` on its compute stream, in order. The loss and its gradient belong to no action."""
    own = [action for order in schedule.ranks for action in order if action.stage == stage]
    begun = iter([action for action in own if action.kind is not Kind.BACKWARD])
    back = iter([action for action in own if action.kind is Kind.BACKWARD])
    found: Done = []
    current: list[Ran] = []  # operators before the first mark
    for one in ran:
        if one.operator == _END:
            current = _after(found)
        elif one.operator in (_BEGIN, _BACK):
            current = []
            found.append((next(begun if one.operator == _BEGIN else back), current))
        else:
            current.append(one)
    return found


def _after(found: Done) -> list[Ran]:
    """Where operators go after a forward or a replay: of a late replay, to the backward that it stands in."""
    stage, kind, i = found[-1][0]
    if kind is Kind.RECOMPUTE and len(found) > 1 and found[-2][0] == (stage, Kind.BACKWARD, i):
        backward = found.pop(-2)[0]  # its few operators before the replay are left out
        found.append((backward, []))
        return found[-1][1]
    return []


def _messages(events: Sequence[Event], copies: Sequence[Ran], stages: int) -> Iterator[Message]:
    """Copies leave for the next stage after a forward, for the one before after a backward; each way they queue."""
    rest = sorted(copies, key=lambda one: one.start_seconds)
    for kind, way in ((Kind.FORWARD, 1), (Kind.BACKWARD, -1)):
        free = 0.0
        for event in events:
            to_stage = event.action.stage + way
            if event.action.kind is not kind or not 0 <= to_stage < stages:
                continue
            due = max(event.end_seconds, free)
            copy = min(rest, key=lambda one: abs(one.start_seconds - due))
            rest.remove(copy)
            free = copy.end_seconds
            yield Message(event.action, to_stage, copy.start_seconds, copy.end_seconds)
