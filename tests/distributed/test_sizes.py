"""Sizes: the bytes that a micro-batch keeps on a stage, recomputed and not."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.distributed.stages import SIZE, Block, batch, schedule_on, stages_of, step
from tests.helpers import leaf
from torchckpt import checkpoint, checkpoint_module
from torchckpt.distributed import recompute_ahead
from torchckpt.distributed.frames import Frames
from torchckpt.distributed.sizes import Size, Sizes

ROW = SIZE * 4  # bytes of a row of float32


class Narrow(nn.Module):
    """Saves its input and its hidden row, for the linear layer, and its output, for the exponential."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return self.linear(x.sin()).exp()


SAVED = 3  # rows


def measured(segments=None, keep=False, regions=2):
    """The size of a stage of two narrow blocks, after a forward and its recompute, of one row."""
    sizes, frames = Sizes(segments), Frames(segments)
    module = nn.Sequential(Narrow(), Narrow())
    for block in module[:regions]:
        checkpoint_module(block)
    for micro_batch in range(2):

        def around(slots, number=micro_batch):
            return sizes.of_replay(0, number, slots, module)

        with frames.gathered(0, micro_batch, keep, around) as gathered, sizes.of_forward(0, keep, gathered):
            y = module(leaf(1, SIZE))
        frames.recompute(0, micro_batch, module)
        y.sum().backward()
    return sizes.found[0]


def test_boundaries_are_what_a_recomputed_forward_keeps():
    size = measured()
    assert size.boundary_bytes == 2 * ROW
    assert (size.regions, size.early) == (2, 2)


def test_saved_are_what_a_kept_forward_keeps():
    """The output of the first block is what the second saves as its input: five rows, not six."""
    size = measured(keep=True)
    assert size == Size(saved_bytes=(2 * SAVED - 1) * ROW)


def test_saved_are_found_in_a_recompute_as_well():
    """Each replay makes an output of its own. The second micro-batch does not count again."""
    size = measured()
    assert size.saved_bytes == 2 * SAVED * ROW


@pytest.mark.parametrize(("segments", "early"), [(0, 0), (1, 1), (2, 2), (3, 2)])
def test_segments(segments, early):
    size = measured(segments)
    assert (size.regions, size.early) == (2, early)
    assert size.saved_bytes == 2 * SAVED * ROW  # those that the backward replays count, too


def test_each_is_counted_once():
    sizes = Sizes(None)
    for rows in (1, 5):
        frames = []
        with sizes.of_forward(3, False, frames):
            checkpoint(torch.sin, leaf(rows, SIZE))
    for rows in (2, 5):
        with sizes.of_forward(3, True, []):
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
    assert [one.boundary_bytes for one in schedule.report().costs] == [first.boundary_bytes, second.boundary_bytes]


def checkpointed(module):
    checkpoint_module(module)
    return module
