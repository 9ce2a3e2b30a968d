"""Schedule objects of torch, made with a process group that sends nothing, as schedules of the model."""
from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.planning.torch_orders import multi
from torchckpt.distributed import schedule_of
from torchckpt.errors import ArgumentError
from torchckpt.planning import Block, Schedule, gpipe, one_f_one_b, simulate

RANKS, MICRO_BATCHES = 4, 8


@pytest.fixture
def group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def stages(*indices, of):
    return [PipelineStage(nn.Linear(2, 2), index, of, torch.device("cpu")) for index in indices]


def loss(output, target):
    return (output - target).sum()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("live", "ours"), [(schedules.ScheduleGPipe, gpipe), (schedules.Schedule1F1B, one_f_one_b)])
def test_schedules_of_one_stage_per_rank(live, ours):
    (stage,) = stages(0, of=RANKS)
    assert schedule_of(live(stage, MICRO_BATCHES, loss_fn=loss)) == ours(RANKS, MICRO_BATCHES)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("name", "indices"),
    [
        ("ScheduleLoopedBFS", (0, 4)),
        ("ScheduleInterleaved1F1B", (0, 4)),
        ("ScheduleInterleavedZeroBubble", (0, 4)),
        ("ScheduleZBVZeroBubble", (0, 7)),
        ("ScheduleDualPipeV", (0, 7)),
    ],
)
def test_schedules_of_several_stages_per_rank(name, indices):
    live = getattr(schedules, name)(stages(*indices, of=2 * RANKS), MICRO_BATCHES, loss_fn=loss)
    schedule = schedule_of(live)
    assert isinstance(schedule, Schedule)
    assert schedule.name == name
    assert [[str(action) for action in order] for order in schedule.ranks] == multi(name, RANKS, 2, MICRO_BATCHES)


@pytest.mark.usefixtures("group")
@pytest.mark.skipif(
    not hasattr(schedules, "analyze_pipeline_activation_liveness"),
    reason="torch says how long activations live from 2.15 on",
)
@pytest.mark.parametrize(
    ("name", "indices"),
    [
        ("ScheduleLoopedBFS", lambda rank: (rank, rank + RANKS)),
        ("ScheduleInterleaved1F1B", lambda rank: (rank, rank + RANKS)),
        ("ScheduleInterleavedZeroBubble", lambda rank: (rank, rank + RANKS)),
        ("ScheduleZBVZeroBubble", lambda rank: (rank, 2 * RANKS - 1 - rank)),
    ],
)
def test_peak_of_a_simulated_step_is_how_many_activations_torch_counts_at_once(name, indices):
    """Not of DualPipeV, whose pairs are two actions here, and one there."""
    live = getattr(schedules, name)(stages(*indices(0), of=2 * RANKS), MICRO_BATCHES, loss_fn=loss)
    counted = [
        schedules.analyze_pipeline_activation_liveness(
            live, pp_rank=rank, stage_indices=indices(rank), granularity="stage_microbatch"
        ).num_slots
        for rank in range(RANKS)
    ]
    assert simulate(schedule_of(live), Block(saved_bytes=1.0)).peak_bytes == tuple(counted)


def test_what_is_no_schedule_is_an_error_that_shows_one():
    text = (
        "schedule_of(): the argument is no schedule of torch.distributed.pipelining that lists its order\n"
        "  received: Linear\n"
        "  works:    schedule_of(ScheduleInterleaved1F1B(stages, n_microbatches=8, loss_fn=loss_fn))"
    )
    with pytest.raises(ArgumentError, match=re.escape(text)):
        schedule_of(nn.Linear(2, 2))
