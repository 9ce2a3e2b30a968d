"""Bugs that were found once, each with its history."""
from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.distributed.conftest import alone  # noqa: F401  # a fixture
from tests.distributed.stages import SIZE, Blocks, ahead, batch, gradients_of, schedule_on, step
from tests.distributed.stages import stages_of as stages_on
from tests.settings import without_collector
from torchckpt import checkpoint
from torchckpt.distributed import recompute_ahead
from torchckpt.regions.saved import bytes_of, saved_bytes

pytestmark = pytest.mark.usefixtures("alone")


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU())
        self.block = torch.compile(block, fullgraph=True, backend="eager")

    def forward(self, x):
        return checkpoint(self.block, x)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("exempt", ["auto", "none"])
def test_a_compiled_block_without_graph_breaks(exempt):
    """The hook that looks for regions of torch in the first forward was traced into compiled blocks, where a C function
    that it calls ended the compilation."""
    schedule, stages = ahead("Schedule1F1B", lambda stage: Compiled(), exempt=exempt)
    step(schedule, stages, *batch(4))
    assert len(gradients_of(stages)) == 2


@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_a_schedule_that_is_dropped_is_freed_without_the_collector(name):
    """The runtime kept bound methods of the schedule, and so the schedule, its stages and their gradients."""
    gc.collect()
    with without_collector():
        schedule, stages = ahead(name)
        step(schedule, stages, *batch(4))
        alive = weakref.ref(stages[0].submod)
        del schedule, stages
        assert alive() is None


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mixing = nn.Linear(SIZE, SIZE), torch.eye(SIZE).to_sparse()

    def forward(self, x):
        return checkpoint(lambda x: torch.sparse.mm(self.mixing, self.linear(x).t()).t(), x)


@pytest.mark.parametrize("exempt", ["auto", "none"])
def test_a_block_that_saves_a_sparse_tensor(exempt):
    """To count the bytes that a stage saves, its storages were asked for, and a sparse tensor has none."""
    schedule, stages = ahead("Schedule1F1B", lambda stage: Sparse(), exempt=exempt)
    step(schedule, stages, *batch(4))
    assert len(gradients_of(stages)) == 2
    with saved_bytes() as saved:
        torch.sparse.mm(torch.eye(2).to_sparse(), torch.ones(2, 2, requires_grad=True))
    assert saved.total == bytes_of([torch.eye(2).to_sparse()]) == 0


def test_a_patch_on_a_stage_outlives_a_step():
    """The methods that are watched during a step were deleted after it, and with them the user's own."""
    schedule, stages = ahead("Schedule1F1B")
    plain, calls = stages[0].forward_one_chunk, []

    def counted(*args, **kwargs):
        calls.append(args[0])
        return plain(*args, **kwargs)

    stages[0].forward_one_chunk = counted
    for _ in range(2):
        step(schedule, stages, *batch(4))
    assert calls == [0, 1, 2, 3] * 2
    assert stages[0].forward_one_chunk is counted


def test_chunks_may_be_called_with_torchs_keywords():
    """The watching methods had parameters of other names, and a custom function could not name them."""
    stages = stages_on("ScheduleDualPipeV", Blocks)
    plain = schedule_on(stages, "ScheduleDualPipeV", 4)
    seen = []

    def overlapped(action, context):
        runtime = context.schedule_ref
        by_index = {stage.stage_index: stage for stage in runtime._stages}
        for part in action.sub_actions:
            stage, i = by_index[part.stage_index], part.microbatch_index
            seen.append(str(part))
            if part.computation_type.value == "F":
                output = stage.forward_one_chunk(
                    fwd_chunk_id=i, args=context.arg_mbs[i], kwargs=context.kwarg_mbs[i], save_forward_output=True
                )
                runtime._maybe_compute_loss(stage, output, context.target_mbs, i)
                if stage.stage_index == 0:
                    by_index[1].set_local_fwd_input(output, i)
            else:
                runtime.backward_counter[stage.stage_index] += 1
                last = runtime.backward_counter[stage.stage_index] == 4
                loss = runtime._maybe_get_loss(stage, i)
                stage.backward_one_chunk(bwd_chunk_id=i, loss=loss, full_backward=True, last_backward=last)
                if stage.stage_index == 1:
                    by_index[0].set_local_bwd_input(stage.get_local_bwd_output(i), i)

    from torch.distributed.pipelining.schedules import OVERLAP_F_B

    plain.register_custom_function(OVERLAP_F_B, overlapped)
    schedule = recompute_ahead(plain)
    step(schedule, stages, *batch(4))
    assert seen
    assert len(gradients_of(stages)) == 16


def test_a_report_right_after_the_steps_that_were_measured():
    """With measured costs the record was cleared when recomputes had moved, and there was no step to report on."""
    schedule, stages = ahead("Schedule1F1B", costs="measured", exempt="none")
    for _ in range(4):
        step(schedule, stages, *batch(4))
    assert "this schedule (measured)" in str(schedule.report())


class Full(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 1:  # the first one infers metadata
            raise torch.OutOfMemoryError("none left")
        return checkpoint(torch.sin, x)


def test_out_of_memory_passes_as_it_is():
    """Loops that try again with fewer rows look for it, and got a ScheduleError. torch wraps what a forward raises."""
    schedule, stages = ahead("Schedule1F1B", lambda stage: nn.Sequential(nn.Linear(SIZE, SIZE), Full()))
    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        step(schedule, stages, *batch(4))

    def full(output, target):
        raise torch.OutOfMemoryError("none left")

    static = torch.zeros(2, SIZE, requires_grad=True)
    stages = stages_on("Schedule1F1B", Blocks, input_args=static, output_args=static)
    with pytest.raises(torch.OutOfMemoryError):
        step(recompute_ahead(schedule_on(stages, "Schedule1F1B", 4, loss=full)), stages, *batch(4))
