"""Blocks of which a part is kept, under a budget: the plan has its bytes, and the step takes those that are planned."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.stages import SIZE, Block, Blocks, batch, parameters_of, schedule_on, stages_of, step
from tests.slow import few
from torchckpt import keep
from torchckpt.distributed import recompute_ahead
from torchckpt.errors import BudgetInfeasible

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")

ROWS = 64
ROW_BYTES = ROWS * SIZE * 4


class Gated(Block):
    """A block with a gate, which is kept: its result, and what its two operators save."""

    calls = 0

    def gate(self, x):
        self.calls += 1
        return x.tanh().exp() * self.calls % 3

    def forward(self, x):
        return super().forward(x) * keep(self.gate, x)


class GatedBlocks(Blocks):
    def __init__(self, stage: int) -> None:
        super().__init__(stage, regions="none")
        with torch.random.fork_rng():
            torch.manual_seed(stage)
            self.blocks = nn.ModuleList(Gated(f"{stage}.{place}") for place in range(2))
        self.regions = "ours"
        self.checkpointed()


def train(mode, steps):
    """A schedule after some steps, and the gradients of the last one."""
    torch.manual_seed(0)
    stages = stages_of("ScheduleGPipe", GatedBlocks)
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 4), **mode)
    for _ in range(steps):
        for parameter in parameters_of(stages):
            parameter.grad = None
        torch.manual_seed(1)
        step(schedule, stages, *batch(4, ROWS))
    return schedule, [parameter.grad for parameter in parameters_of(stages)]


@pytest.mark.usefixtures("alone")
def test_what_is_kept_is_in_memory_wherever_a_block_is_recomputed():
    schedule, _ = train({"budget": "1GB"}, 5)
    (stage,) = schedule.plan.problem.stages
    kept = [block.boundary_bytes / ROW_BYTES for block in stage.blocks]
    # The result; of the second one tanh and exp as well, whose input has a gradient, and that input.
    assert kept == [1, 4]


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("budget", ["1GB", "85%", "least"])
def test_a_step_takes_the_bytes_that_are_planned(budget):
    if budget == "least":
        with pytest.raises(BudgetInfeasible) as error:
            train({"budget": 1000}, 5)
        budget = error.value.least_bytes
    schedule, gradients = train({"budget": budget}, 7)
    report = schedule.report()
    assert report.measured_peak_bytes == report.planned_peak_bytes
    assert report.measured_peak_bytes[0] <= report.budget_bytes[0]
    recomputed = sum(len(one.early) + len(one.late) for one in schedule.plan.choices.values())
    assert (recomputed > 0) == (budget != "1GB")
    expected = train({}, 7)[1]
    assert all(map(torch.equal, gradients, expected))
