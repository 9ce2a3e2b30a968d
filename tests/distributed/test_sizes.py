"""Sizes: the bytes that a micro-batch keeps on a stage, recomputed and not."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.distributed.stages import SIZE, Block, batch, schedule_on, stages_of, step
from tests.helpers import leaf
from torchckpt import checkpoint, checkpoint_module
from torchckpt.distributed import recompute_ahead
from torchckpt.distributed.record import Size, Sizes

ROW = SIZE * 4  # bytes of a row of float32


class Narrow(nn.Module):
    """Saves its sine and its output, and its input where that has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return self.linear(x.sin()).exp()


def measured(**options):
    """The size of a stage of two narrow blocks, after a step of a micro-batch of one row."""
    module, row = nn.Sequential(Narrow(), Narrow()), torch.ones(1, SIZE)
    for block in module:
        checkpoint_module(block)
    stages = stages_of("ScheduleGPipe", lambda stage: module, input_args=row, output_args=row)
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 1), **options)
    step(schedule, stages, row, row)
    return schedule._sizes.found[0]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("segments", "early"), [(None, 2), (0, 0), (1, 1), (2, 2), (3, 2)])
def test_of_a_stage_that_is_recomputed(segments, early):
    """The boundary is the input of each block. The first block saves two more; a replay makes its output again."""
    size = measured(segments=segments, exempt="none")
    assert size.boundary_bytes == 2 * ROW
    assert (size.regions, size.early) == (2, early)
    assert size.saved_bytes == size.boundary_bytes + (2 + 2) * ROW


@pytest.mark.usefixtures("alone")
def test_of_a_stage_that_is_exempt():
    """The output of the first block is what the second saves as its input."""
    assert measured(exempt={(0, 0)}) == Size(saved_bytes=(2 + 2) * ROW)


def test_each_is_counted_once():
    sizes = Sizes(None)
    for rows in (1, 5):
        frames = []
        with sizes.of_forward(3, 0, False, frames):
            checkpoint(torch.sin, leaf(rows, SIZE))
    for rows in (2, 5):
        with sizes.of_forward(3, 0, True, []):
            leaf(rows, SIZE).exp()
    assert sizes.found == {3: Size(saved_bytes=2 * ROW, boundary_bytes=ROW)}


@pytest.mark.usefixtures("alone")
def test_of_a_step():
    stages = stages_of("ScheduleInterleaved1F1B", lambda stage: checkpointed(Block()))
    schedule = recompute_ahead(schedule_on(stages, "ScheduleInterleaved1F1B", 4), exempt={(1, 0)})
    for _ in range(2):
        step(schedule, stages, *batch(4))
    first, second = schedule._sizes.found[0], schedule._sizes.found[1]
    assert (first.regions, first.early, second.regions, second.early) == (1, 1, 1, 1)
    assert second.boundary_bytes == 2 * ROW  # two rows
    assert second.saved_bytes > second.boundary_bytes
    boundaries = [one.arriving_bytes for one in schedule.report().step.stages]
    assert boundaries == [first.boundary_bytes, second.boundary_bytes]


def checkpointed(module):
    checkpoint_module(module)
    return module
