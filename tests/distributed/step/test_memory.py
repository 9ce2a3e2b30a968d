"""Memory: how much is alive at the peak of a step, and that nothing is afterwards."""
from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.distributed.stages import NAMES, SINGLE, SPLIT, TWO_STAGES, Blocks, batch, schedule_on, stages_of, step
from tests.settings import without_collector
from tests.slow import few, slow
from torchckpt.distributed import recompute_ahead
from torchckpt.regions.flags import local

INSIDE = 2  # tensors that a block saves, and that nobody else keeps


class LiveBytes:
    """The storages of what was made inside blocks, and how many of them were alive at once."""

    def __init__(self) -> None:
        self.storages: list[StorageWeakRef] = []
        self.peak = 0

    def made(self, *tensors: torch.Tensor) -> None:
        self.storages += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        self.peak = max(self.peak, self.now)

    @property
    def now(self) -> int:
        return sum(not storage.expired() for storage in self.storages)


class Watched(nn.Module):
    """A block that shows what it saves to its ``alive`` before it saves the last of it."""

    def __init__(self, block: nn.Module, alive: LiveBytes) -> None:
        super().__init__()
        self.first, self.second, self.alive = block.first, block.second, alive

    def forward(self, x):
        hidden = self.first(x)
        active = nn.functional.gelu(hidden)
        self.alive.made(hidden, active)
        return x + self.second(active)


def watched(alive, count, regions):
    """Makes stages of ``count`` watched blocks."""

    def make(stage):
        blocks = Blocks(stage, count, "none")
        blocks.blocks = nn.ModuleList(Watched(block, alive) for block in blocks.blocks)
        blocks.regions = regions
        return blocks.checkpointed()

    return make


def peak(name, count=1, m=4, mode=None, regions="ours"):
    """Tensors inside of blocks alive at the peak of a step that is not the first, in blocks' worth."""
    alive = LiveBytes()
    stages = stages_of(name, watched(alive, count, regions))
    schedule = schedule_on(stages, name, m)
    schedule = schedule if mode is None else recompute_ahead(schedule, **mode)
    for _ in range(2):
        alive.peak = 0
        step(schedule, stages, *batch(m))
    assert alive.now == 0
    return alive.peak / INSIDE


NONE = {"exempt": "none"}


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", [*SINGLE, "ScheduleInterleaved1F1B", "ScheduleLoopedBFS"])
def test_with_a_region_per_stage_the_peak_is_that_of_stock_checkpointing(name):
    stock = peak(name, regions="torch")
    assert peak(name, mode=NONE) == stock == 1
    if name != "Schedule1F1B":  # which has one micro-batch alive on its one stage
        assert peak(name, regions="none") > 1


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", [*SINGLE, "ScheduleInterleaved1F1B", "ScheduleLoopedBFS"])
@pytest.mark.parametrize("segments", [0, *slow([1]), 2])
def test_segments_bound_the_peak(name, segments):
    """``early`` segments are alive before the backward frees the first of them; the others one at a time."""
    stock = peak(name, 3, regions="torch")
    assert stock == 1
    assert peak(name, 3, mode={"segments": segments}) == max(stock, segments)
    assert peak(name, 3, mode=NONE) == 3


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", [*SINGLE, *TWO_STAGES, "ScheduleInterleavedZeroBubble"])
def test_what_is_exempt_by_default_does_not_raise_the_peak(name):
    """Between actions: what a forward itself has in flight comes on top, as gradients do in a backward."""
    kept = alive_before_actions(name, {})
    assert max(kept) == max(alive_before_actions(name, NONE)) == 2
    assert kept.count(2) >= alive_before_actions(name, NONE).count(2)


def alive_before_actions(name, mode):
    alive, seen = LiveBytes(), []
    stages = stages_of(name, watched(alive, 2, "ours"))
    schedule = recompute_ahead(schedule_on(stages, name, 4), **mode)
    step(schedule, stages, *batch(4))
    reaches = schedule.reaches
    schedule.reaches = lambda action: (seen.append(alive.now / INSIDE), reaches(action))
    step(schedule, stages, *batch(4))
    return seen


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["ScheduleZBVZeroBubble", "ScheduleInterleavedZeroBubble"])
def test_in_a_split_backward_stock_checkpointing_holds_two_replays(name):
    """One for the inputs, and another for the weights; here both are served by one."""
    assert peak(name, mode=NONE) == 1
    assert peak(name, regions="torch") == 2


@pytest.mark.usefixtures("alone")
def test_a_replay_that_stands_before_a_pair_is_alive_in_the_forward_of_that():
    assert peak("ScheduleDualPipeV", mode=NONE) == peak("ScheduleDualPipeV", regions="torch") + 1


# afterwards -----------------------------------------------------------------------------------------------------------


@few(2)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("Schedule")])
@pytest.mark.parametrize("mode", [{}, {"segments": 1}, *slow([{"exempt": "none"}, {"segments": 0}])], ids=str)
def test_after_a_step_nothing_is_left(name, mode):
    alive, frames = LiveBytes(), []
    stages = stages_of(name, watched(alive, 2, "ours"))
    schedule = recompute_ahead(schedule_on(stages, name, 4), **mode)
    step(schedule, stages, *batch(4))
    recompute = schedule.recompute

    def remembered(action):
        frames.extend(map(weakref.ref, schedule._frames._waiting[action.stage, action.micro_batch]))
        recompute(action)

    schedule.recompute = remembered
    with without_collector():
        step(schedule, stages, *batch(4))
        # With no segment there is nothing to recompute ahead.
        assert frames or name == "Schedule1F1B" or mode == {"segments": 0}
        assert [frame() for frame in frames if frame() is not None] == []
        assert alive.now == 0
    assert schedule._frames._waiting == {}
    assert local.thread.scope is None


class View(Blocks):
    """Its output is a view, from which torch cannot take its graph."""

    def forward(self, x):
        return super().forward(x).transpose(0, 1).transpose(0, 1)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", [*SINGLE, SPLIT[0]])
def test_outputs_that_wait_for_the_end_of_the_step_have_no_graph(name):
    stages = stages_of(name, View)
    step(recompute_ahead(schedule_on(stages, name, 4)), stages, *batch(4))
    outputs = stages[-1].output_chunks
    assert len(outputs) == 4
    assert [output.grad_fn for output in outputs] == [None] * 4
