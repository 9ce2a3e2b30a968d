"""Trace: a timeline as Chrome trace JSON, which https://ui.perfetto.dev opens.

A rank is a process. Each of its stages has three rows: what it computes, and what it sends forward and backward.
Slices that overlap on one row are rejected there; times are whole nanoseconds, so that rounding makes none.
"""
from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from torchckpt.planning.draw.units import KIND_NAMES, Units
from torchckpt.planning.figures import TimelineFigures
from torchckpt.planning.order.schedule import Action

__all__ = ["trace"]

_Entry = dict[str, Any]
_STREAMS = ("compute", "link out forward", "link out backward")
"""The rows of a stage."""


def trace(*timelines: TimelineFigures, names: Sequence[str] = (), units: Units | None = None) -> str:
    """The JSON text; several timelines stand one under the other.

    >>> text = trace(simulate(gpipe(2, 4)))  # for Path("step.json").write_text(text)

    Args:
        timelines: what to write.
        names: of the timelines, to stand before ``rank 0``; by default none.
        units: in what memory counts; by default in A.
    """
    entries: list[_Entry] = []
    first_process = 0
    for index, timeline in enumerate(timelines):
        prefix = f"{names[index]}: " if index < len(names) else ""
        entries += _entries(timeline, prefix, first_process, units or Units())
        first_process += len(timeline.schedule.ranks)
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


def _entries(timeline: TimelineFigures, prefix: str, first_process: int, units: Units) -> Iterator[_Entry]:
    placement = timeline.schedule.placement
    for rank in range(len(timeline.schedule.ranks)):
        yield from _named("process", f"{prefix}rank {rank}", first_process + rank, 0)
    for stage, rank in enumerate(placement):
        for stream, name in enumerate(_STREAMS):
            yield from _named("thread", f"stage {stage} {name}", first_process + rank, _row(stage, stream))
    for event in timeline.events:
        place = (first_process + event.rank, _row(event.action.stage, 0))
        yield _slice(event.action, place, event.start_seconds, event.end_seconds, str(event.action))
    for message in timeline.messages:
        stage, start, end = message.action.stage, message.sent_seconds, message.arrived_seconds
        if end > start:
            place = (first_process + placement[stage], _row(stage, 1 if message.to_stage > stage else 2))
            yield _slice(message.action, place, start, end, f"{message.action} to stage {message.to_stage}")
    for rank, curve in enumerate(timeline.memory):
        for seconds, amount in dict(curve).items():  # of changes at one moment, the last
            counted = {units.memory: amount / units.bytes}
            yield {"ph": "C", "pid": first_process + rank, "name": "memory", "ts": _micro(seconds), "args": counted}


def _row(stage: int, stream: int) -> int:
    return 1 + stage * len(_STREAMS) + stream


def _named(what: str, name: str, process: int, row: int) -> Iterator[_Entry]:
    head: _Entry = {"ph": "M", "pid": process, "tid": row}
    yield {**head, "name": f"{what}_name", "args": {"name": name}}
    yield {**head, "name": f"{what}_sort_index", "args": {"sort_index": process if what == "process" else row}}


def _slice(action: Action, place: tuple[int, int], start_seconds: float, end_seconds: float, name: str) -> _Entry:
    """A slice of ``place``, a process and a row."""
    start, end = _micro(start_seconds), _micro(end_seconds)
    detail = {"stage": action.stage, "micro_batch": action.micro_batch}
    head: _Entry = {"ph": "X", "pid": place[0], "tid": place[1], "name": name, "cat": KIND_NAMES[action.kind.value]}
    return {**head, "ts": start, "dur": round(end - start, 3), "args": detail}


def _micro(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(seconds * 1e6, 3)
