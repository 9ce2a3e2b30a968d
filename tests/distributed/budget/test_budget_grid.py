"""Every schedule of torch, on two ranks and on four, at many budgets: a budget holds, and is used."""
from __future__ import annotations

import functools

import pytest
from torch import nn

from tests.distributed.ranks import attempted, on_ranks
from tests.distributed.stages import (
    LOOPED,
    OLD,
    SINGLE,
    SIZE,
    V_SHAPED,
    Block,
    batch,
    indices,
    parameters_of,
    schedule_on,
    stages_of,
    step,
)
from tests.settings import with_gloo
from torchckpt import checkpoint_module
from torchckpt.distributed import recompute_ahead
from torchckpt.errors import BudgetInfeasible

pytestmark = [with_gloo, pytest.mark.skipif(OLD, reason="torch 2.11 alone: gloo cannot send to itself")]

ROWS = 128  # so that activations take most of the bytes
STEPS = 6  # four that are measured, and two that follow the plan
ALL = (*SINGLE, *LOOPED, *V_SHAPED)
QUICK = [("ScheduleInterleavedZeroBubble", "70%")]
GRID = [(name, f"{share}%") for name in ALL for share in (35, 45, 55, 65, 75, 90)]


class Stage(nn.Module):
    """Blocks of one size; the last stage has a head, whose output is a view."""

    def __init__(self, stage: int, blocks: int, last: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(SIZE, SIZE) if stage == last else None
        for block in self.blocks:
            checkpoint_module(block)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x).view(len(x), -1)


def stepped(name, ranks, budget):
    """After a step whose bytes were counted."""
    count = ranks * len(indices(name, 0, ranks))
    stages = stages_of(name, functools.partial(Stage, blocks=4 if ranks == count else 3, last=count - 1))
    m = 2 * ranks
    schedule = recompute_ahead(schedule_on(stages, name, m), budget=budget)
    for _ in range(STEPS):
        for parameter in parameters_of(stages):
            parameter.grad = None
        step(schedule, stages, *batch(m, ROWS))
    return schedule


def cell(name, ranks, budget):
    """Measured and planned peaks over the budget, of each rank; the planned step over the bound."""
    try:
        schedule = stepped(name, ranks, budget)
    except BudgetInfeasible as error:  # what it says is needed is enough, and is what is taken
        schedule = stepped(name, ranks, error.least_bytes)
    report = schedule.report()
    used = [peak / limit for peak, limit in zip(report.measured_peak_bytes, report.budget_bytes)]
    foretold = [peak / limit for peak, limit in zip(report.planned_peak_bytes, report.budget_bytes)]
    return used, foretold, report.plan.step_seconds / report.plan.bound_seconds


def cells(rank, ranks, which):
    return {(name, budget): attempted(cell, name, ranks, budget) for name, budget in which}


def check(folder, ranks, which):
    (first, *_) = on_ranks(functools.partial(cells, ranks=ranks, which=which), folder, ranks, timeout=900)
    seen = "\n".join(f"{name} {budget}: {found}" for (name, budget), found in first.items())
    for used, foretold, over in first.values():
        assert max(used) <= 1 + 1e-9, seen
        assert all(own <= planned + 1e-9 for own, planned in zip(used, foretold)), seen
        assert max(used) >= 0.85 or over <= 1.03, seen  # more bytes would be no help
    return seen


def test_some_budgets(tmp_path):
    check(tmp_path, 2, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule_at_every_budget(ranks, tmp_path):
    print(check(tmp_path, ranks, GRID))
