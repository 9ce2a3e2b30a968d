"""Record: the records of all ranks, combined."""
from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from torchckpt.distributed.meeting import all_gather
from torchckpt.measuring.record import Record
from torchckpt.planning import Block, Schedule, Stage, Step, fixed
from torchckpt.planning.order.schedule import Visit
from torchckpt.planning.step.measured import Span, Spans, measured_step
from torchckpt.planning.step.memory import Level, Piece

__all__ = ["Gathered", "combined", "gather", "larger_level"]

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_UNKNOWN = Stage((fixed(),))
"""A stage whose bytes were not counted yet."""


class Gathered(NamedTuple):
    """The measurements of all ranks of a group; equal on every rank."""

    step: Step
    """The step that was run, with the medians that were measured; each region is a block of its stage."""
    spans: list[Spans]
    """The spans of each kept step. If the pipeline has replicas, the steps of the first come first."""


def gather(
    schedule: Schedule,
    kept: Collection[Visit],
    segments: int | None,
    rank: int,
    record: Record,
    counted: Mapping[int, Stage],
    group: dist.ProcessGroup | None,
) -> Gathered:
    """Combine the records of all ranks. Collective: all ranks must call it.

    Processes on one machine share a clock. Clocks of different machines are compared after a barrier, with an error of
    about the time of one message.

    Args:
        kept: the visits of which nothing is recomputed.
        segments: how many regions a recompute action replays, the last ones; None for all.
        counted: the bytes of the stages of this ``rank`` of the pipeline.
    """
    with record.device_current():  # NCCL's collectives are on the current device
        dist.barrier(group)
        mine = socket.gethostname(), time.perf_counter(), rank, record.spans(), counted
        processes = all_gather(mine, group)
    replicas: list[list[list[list[Span]]]] = [[] for _ in schedule.ranks]
    stages: dict[int, Stage] = {}
    for host, now, place, steps, stages_of_process in processes:
        ahead = 0.0 if host == processes[0][0] else now - processes[0][1]
        replicas[place].append([[_shifted(span, ahead) for span in step] for step in steps])
        stages = combined(stages, stages_of_process, larger_stage)
    spans: list[Spans] = [list(ranks) for replica in zip(*replicas) for ranks in zip(*replica)]
    in_order = [stages.get(stage, _UNKNOWN) for stage in range(schedule.stages)]
    return Gathered(measured_step(schedule, kept, segments, in_order, spans), spans)


def _shifted(span: Span, seconds: float) -> Span:
    action, *times = span.action, span.due_seconds, span.start_seconds, span.end_seconds
    return Span(action, *(time - seconds for time in times))


# replicas of a pipeline, whose micro-batches may have other sizes: one plan is for the most bytes of any --------------


def combined(
    first: Mapping[_Key, _Value], other: Mapping[_Key, _Value], larger: Callable[[_Value, _Value], _Value]
) -> dict[_Key, _Value]:
    """What two processes have: of what both have, the ``larger``."""
    both = {key: larger(value, other[key]) for key, value in first.items() if key in other}
    return {**first, **other, **both}


def larger_level(first: Level, other: Level) -> Level:
    """The levels of an action that two processes ran: each number is the larger one."""
    places = [[(piece.block, piece.is_replay) for piece in level.pieces] for level in (first, other)]
    pairs = zip(first.pieces, other.pieces) if places[0] == places[1] else ()
    pieces = (Piece(*one[:2], *map(max, one[2:], two[2:])) for one, two in pairs)
    highest, left, entered = map(max, first[:3], other[:3])
    return Level(highest, left, entered, tuple(pieces))


def larger_stage(first: Stage, other: Stage) -> Stage:
    """A stage that takes as much as either, whatever becomes of its blocks."""
    if len(first.blocks) != len(other.blocks):  # no plan is for both: a forward of the other will say so
        return first
    before, *blocks, after = map(_larger_block, first.parts, other.parts)
    return replace(first, blocks=tuple(blocks), before=before, after=after)


def _larger_block(first: Block, other: Block) -> Block:
    seconds = max(first.recompute_seconds, other.recompute_seconds)
    boundary, freed = max(first.boundary_bytes, other.boundary_bytes), max(first.freed_bytes, other.freed_bytes)
    larger = replace(first, recompute_seconds=seconds, saved_bytes=boundary + freed, boundary_bytes=boundary)
    if first.moved_bytes is None or other.moved_bytes is None:
        return larger
    moved = max(first.moved_bytes, other.moved_bytes)
    stays = max(first.saved_bytes - first.moved_bytes, other.saved_bytes - other.moved_bytes)
    return replace(larger, saved_bytes=max(larger.saved_bytes, moved + stays), moved_bytes=moved)
