"""Record: the records of all ranks, combined."""
from __future__ import annotations

import socket
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch.distributed as dist

from torchckpt.distributed.meeting import all_gather
from torchckpt.distributed.replicas import larger_stages
from torchckpt.measuring.record import Record
from torchckpt.planning import Schedule, Stage, Step, fixed
from torchckpt.planning.order.schedule import Visit
from torchckpt.planning.step.measured import Span, Spans, measured_step

__all__ = ["Gathered", "gather"]

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
        stages = larger_stages(stages, stages_of_process)
    spans: list[Spans] = [list(ranks) for replica in zip(*replicas) for ranks in zip(*replica)]
    in_order = [stages.get(stage, _UNKNOWN) for stage in range(schedule.stages)]
    return Gathered(measured_step(schedule, kept, segments, in_order, spans), spans)


def _shifted(span: Span, seconds: float) -> Span:
    action, *times = span.action, span.due_seconds, span.start_seconds, span.end_seconds
    return Span(action, *(time - seconds for time in times))
