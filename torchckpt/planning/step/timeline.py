"""Timeline: one step that says of itself what it took, as text and as a picture."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike

from torchckpt.planning.draw.svg import svg
from torchckpt.planning.draw.units import Units, aligned, percent, row_name, units_for
from torchckpt.planning.figures import Drawn, Event, Message, TimelineFigures
from torchckpt.planning.order.program import NOTHING, Program, Run
from torchckpt.planning.order.schedule import Action, Kind, Schedule

__all__ = ["Timeline", "critical_path", "message_of"]

_COLUMNS = (
    ("forward", (Kind.FORWARD,)),
    ("backward", (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)),
    ("recompute", (Kind.RECOMPUTE,)),
)


@dataclass(frozen=True)
class Timeline(TimelineFigures, Drawn):
    """One step, simulated or measured. ``print()`` shows a table, a notebook the picture.

    >>> print(simulate(one_f_one_b(2, 4)))
    1f1b, 2 stages, 4 micro-batches: step 15
    <BLANKLINE>
             forward  backward  recompute    idle  peak
    stage 0        4         8          0  20.0 %   2 A
    stage 1        4         8          0  20.0 %   1 A
    """

    units: Units | None = field(default=None, compare=False, repr=False)
    """The units in which it is written. Default: seconds and bytes where memory is large, else bare numbers."""

    def draw(
        self,
        path: str | PathLike[str] | None = None,
        *,
        budget_bytes: float | Sequence[float] | None = None,
        copies: bool = False,
    ) -> str:
        """The picture as SVG text: who does what when, and the memory that it takes.

        >>> text = simulate(one_f_one_b(2, 4)).draw()  # draw("step.svg") also writes it

        Args:
            path: the file to which it is written. Default: none.
            budget_bytes, copies: as of :func:`~torchckpt.planning.draw.svg.svg`.
        """
        return self._written(path, svg(self, budget_bytes=budget_bytes, units=self._units, copies=copies))

    def __str__(self) -> str:
        schedule, units = self.schedule, self._units
        has_memory = any(self.memory)
        rows = [("", *(name for name, _ in _COLUMNS), "idle", *(["peak"] * has_memory))]
        for rank, idle in enumerate(self.idle_share):
            times = (units.of_time(self._seconds_of(rank, kinds)) for _, kinds in _COLUMNS)
            peak = [units.of_memory(self.peak_bytes[rank])] if has_memory else []
            rows.append((row_name(schedule, rank), *times, percent(idle), *peak))
        return f"{schedule.name}, {schedule.counts}: step {units.of_time(self.step_seconds)}\n\n{aligned(rows)}"

    @property
    def _units(self) -> Units:
        return self.units or units_for(max(self.peak_bytes, default=0.0))

    def _seconds_of(self, rank: int, kinds: Sequence[Kind]) -> float:
        events = (event for event in self.events if event.rank == rank and event.action.kind in kinds)
        return sum(event.end_seconds - event.start_seconds for event in events)


def critical_path(schedule: Schedule, program: Program, played: Run) -> tuple[Event | Message, ...]:
    """The critical path, from the start of the step to its end; each entry begins when the previous entry ends.

    If the rank became free and the input arrived at the same moment, the path follows the rank.
    """
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
        rank, position = program.senders[token]
        path.append(message_of(schedule, program.actions[rank][position], played, token))
        while played.sent[token] > played.ends[rank][position]:
            instructions, wire = program.ranks[rank], program.ranks[rank][position][3]  # the one before it on its wire
            position = next(before for before in range(position - 1, -1, -1) if instructions[before][3] == wire)
            token = instructions[position][1]
            path.append(message_of(schedule, program.actions[rank][position], played, token))
    return tuple(reversed(path))


def message_of(schedule: Schedule, action: Action, played: Run, token: int) -> Message:
    """The message that brought ``token``, which ``action`` sent."""
    to_stage = token // schedule.micro_batches % schedule.stages
    return Message(action, to_stage, played.sent[token], played.arrived[token])
