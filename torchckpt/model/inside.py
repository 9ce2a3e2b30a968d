"""Inside: recomputes that ran inside backwards, as events of their own."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torchckpt.model.action import Kind
from torchckpt.model.costs import StageCosts
from torchckpt.model.memory import curves
from torchckpt.model.orders import Visit
from torchckpt.model.placement import with_recompute, without_recompute
from torchckpt.model.policy import arrival
from torchckpt.model.run import Run
from torchckpt.model.schedule import Segments
from torchckpt.model.timeline import Event, Timeline

__all__ = ["replays_apart"]

_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD)


def replays_apart(
    timeline: Timeline, replays: Mapping[Visit, Sequence[float]], costs: Sequence[StageCosts]
) -> Timeline:
    """``timeline`` with an ``R`` where a backward that recomputed begins, and the backward behind it.

    A backward that recomputes region by region goes to and fro between the two; here its replays stand together.

    >>> timeline = schedule.timeline()      # measured, of recompute_ahead(..., segments=0)
    >>> apart = replays_apart(timeline, {(0, 0): [0.021, 0.019], (0, 1): [0.02, 0.02]}, costs)

    Args:
        timeline: a measured one whose recomputes all ran inside backwards; an ``R`` that it has did nothing.
        replays: of each (stage, micro-batch) that was recomputed, the seconds of each of its regions.
        costs: per stage, for the bytes of the curve of memory: in it one region at a time is recomputed.
    """
    plain = without_recompute(timeline.schedule)
    counts = [1] * plain.stages
    for (stage, _), regions in replays.items():
        counts[stage] = max(counts[stage], len(regions))
    segments = tuple(Segments(1, count) for count in counts)
    schedule = replace(with_recompute(plain, arrival(only=tuple(replays))), segments=segments)
    events = tuple(part for event in timeline.events for part in _parts(event, replays))
    ranks = [[event for event in events if event.rank == rank] for rank in range(len(schedule.ranks))]
    starts = [[event.start_seconds for event in own] for own in ranks]
    ends = [[event.end_seconds for event in own] for own in ranks]
    memory = curves(schedule, costs, Run(starts, ends, [], []))
    return replace(timeline, schedule=schedule, events=events, memory=memory)


def _parts(event: Event, replays: Mapping[Visit, Sequence[float]]) -> Iterator[Event]:
    stage, kind, i = event.action
    if kind in _BACKWARDS and (stage, i) in replays:
        turn = min(event.start_seconds + sum(replays[stage, i]), event.end_seconds)
        yield replace(event, action=event.action._replace(kind=Kind.RECOMPUTE), end_seconds=turn)
        yield replace(event, start_seconds=turn)
    elif kind is not Kind.RECOMPUTE:
        yield event
