"""The bytes that a micro-batch keeps on a stage, as they are counted in a step, recomputed and not."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.distributed.stages import SIZE, Block, batch, schedule_on, stages_of, step
from torchckpt import checkpoint_module
from torchckpt.distributed import recompute_ahead
from torchckpt.measuring.saved import CountingScope

ROW = SIZE * 4  # bytes of a row of float32


class Narrow(nn.Module):
    """Saves its sine and its output, and its input where that has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return self.linear(x.sin()).exp()


def measured(**options):
    """A stage of two narrow blocks, after a step of a micro-batch of one row."""
    module, row = nn.Sequential(Narrow(), Narrow()), torch.ones(1, SIZE)
    for block in module:
        checkpoint_module(block)
    stages = stages_of("ScheduleGPipe", lambda stage: module, input_args=row, output_args=row)
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 1), **options)
    step(schedule, stages, row, row)
    return schedule._counted[0]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("segments", [None, 0, 1, 2, 3])
def test_of_a_stage_that_is_recomputed(segments):
    """The boundary is the input of each block. The first block saves two more; a replay makes its output again."""
    stage = measured(segments=segments, exempt="none")
    assert stage.least_bytes == 2 * ROW
    assert [block.boundary_bytes for block in stage.blocks] == [ROW, ROW]
    assert stage.saved_bytes == stage.least_bytes + (2 + 2) * ROW


@pytest.mark.usefixtures("alone")
def test_of_a_stage_that_is_exempt():
    """The output of the first block is what the second saves as its input."""
    stage = measured(exempt={(0, 0)})
    assert stage.saved_bytes == (2 + 2) * ROW
    assert len(stage.blocks) == 1


@pytest.mark.usefixtures("alone")
def test_each_is_counted_once(monkeypatch):
    made = []
    plain = CountingScope.__init__
    monkeypatch.setattr(CountingScope, "__init__", lambda *args: (made.append(args[1]), plain(*args))[1])
    stages = stages_of("ScheduleGPipe", lambda stage: checkpointed(Block()))
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 4), exempt={(0, 0), (0, 1)})
    for _ in range(2):
        step(schedule, stages, *batch(4))
    assert made == [True, False]  # a visit that is kept, and the first that is recomputed, which counts


@pytest.mark.usefixtures("alone")
def test_of_a_step():
    stages = stages_of("ScheduleInterleaved1F1B", lambda stage: checkpointed(Block()))
    schedule = recompute_ahead(schedule_on(stages, "ScheduleInterleaved1F1B", 4), exempt={(1, 0)})
    for _ in range(2):
        step(schedule, stages, *batch(4))
    first, second = schedule._counted[0], schedule._counted[1]
    assert (len(first.blocks), len(second.blocks)) == (1, 1)
    assert second.least_bytes == 2 * ROW  # two rows
    assert second.saved_bytes > second.least_bytes
    boundaries = [one.arriving_bytes for one in schedule.report().step.stages]
    assert boundaries == [first.least_bytes, second.least_bytes]


def checkpointed(module):
    checkpoint_module(module)
    return module
