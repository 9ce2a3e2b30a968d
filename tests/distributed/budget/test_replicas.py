"""Replicas of a pipeline that have micro-batches of other sizes, and follow one plan."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import attempted, on_ranks
from tests.distributed.stages import Blocks, Stage, equal, schedule_on, train
from tests.settings import with_gloo
from torchckpt.distributed import recompute_ahead
from torchckpt.errors import BudgetInfeasible

pytestmark = with_gloo

NAME, M, STEPS = "ScheduleInterleaved1F1B", 4, 6
FEW, MANY = 16, 64


def trained(group, rows, **mode):
    """What a replica of two stages on one rank sees, and its report."""
    modules = [Blocks(index, regions="ours" if mode else "none") for index in range(2)]
    stages = [Stage(module, index, 2, torch.device("cpu"), group=group) for index, module in enumerate(modules)]
    schedule = schedule_on(stages, NAME, M)
    if mode:
        schedule = recompute_ahead(schedule, **mode)
    seen = train(schedule, stages, M, STEPS, rows)
    return seen, schedule.report() if mode else None


def least_of(group, rows):
    try:
        trained(group, rows, budget=1000)
    except BudgetInfeasible as error:
        return error.least_bytes


def within(group, rows, budget):
    expected, _ = trained(group, rows)
    seen, report = trained(group, rows, budget=budget)
    recomputed = sum(len(one.early) + len(one.late) for one in report.plan.choices.values())
    return equal(seen, expected), recomputed, report


def work(rank):
    mine = [dist.new_group([each]) for each in range(2)][rank]
    report = {}
    for sizes in ((FEW, MANY), (MANY, FEW), (MANY, MANY)):
        report["least", sizes] = attempted(least_of, mine, sizes[rank])
        report["80%", sizes] = attempted(within, mine, sizes[rank], "80%")
    return report


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    return on_ranks(work, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("sizes", [(FEW, MANY), (MANY, FEW)], ids=str)
def test_the_plan_is_for_the_largest(reported, sizes):
    assert {report["least", sizes] for report in reported} == {reported[0]["least", (MANY, MANY)]}
    for report in reported:
        is_equal, recomputed, steps = report["80%", sizes]
        assert is_equal
        assert recomputed > 0
        assert steps.budget_bytes == report["80%", (MANY, MANY)][2].budget_bytes
        assert steps.measured_peak_bytes <= steps.planned_peak_bytes
