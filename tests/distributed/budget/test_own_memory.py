"""Blocks whose own backward, or forward, takes much memory: beside blocks that are kept it comes on top of them."""
from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

from tests.distributed.budget.test_gradients import NEW
from tests.distributed.stages import SIZE, SPLIT, batch, parameters_of, schedule_on, stages_of, step
from tests.own_memory import Around, Nested, Plain, Spread, Summed, SummedFirst, SummedLast
from tests.settings import with_gloo
from tests.slow import few, slow_but
from torchckpt import BudgetInfeasible, checkpoint_module
from torchckpt.distributed import phases, recompute_ahead

pytestmark = [with_gloo, pytest.mark.usefixtures("alone")]

ROWS = 128


class Stage(nn.Module):
    def __init__(self, *kinds):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.Sequential(*(kind(SIZE) for kind in kinds))
        for block in self.blocks:
            checkpoint_module(getattr(block, "region", block))

    def forward(self, x):
        return self.blocks(x)


STAGES = {
    "nested": (Plain, Nested), "between": (Plain, Nested, Plain, Spread), "spread": (Plain, Plain, Spread),
    "first": (SummedFirst, SummedFirst, SummedFirst), "last": (SummedLast, SummedLast, SummedLast),
    "unsaved": (Plain, Summed, Plain), "around": (Around, SummedLast, Plain),
}  # fmt: skip


def stepped(name, kinds, budget, steps=6):
    stages = stages_of(name, lambda index: Stage(*STAGES[kinds]))
    schedule = recompute_ahead(schedule_on(stages, name, 4), budget=budget)
    for _ in range(steps):
        for parameter in parameters_of(stages):
            parameter.grad = None
        step(schedule, stages, *batch(4, ROWS))
    return schedule


NAMES = ("ScheduleGPipe", "Schedule1F1B", SPLIT[0])
QUICK = [
    (NAMES[1], "nested"), (NAMES[0], "between"), (NAMES[2], "spread"), (NAMES[0], "last"),
    (NAMES[0], "unsaved"), (NAMES[0], "around"),
]  # fmt: skip


@few(1)
@pytest.mark.parametrize(("name", "kinds"), slow_but(QUICK, [(name, kinds) for name in NAMES for kinds in STAGES]))
def test_a_step_takes_at_most_what_is_planned(name, kinds):
    with pytest.raises(BudgetInfeasible) as caught:
        stepped(name, kinds, 1000)
    least, kept = caught.value.least_bytes, stepped(name, kinds, "100%").report().budget_bytes[0]
    for share in (0.0, 0.3, 0.6, 0.9, 1.0):
        report = stepped(name, kinds, least + share * (kept - least)).report()
        (measured,), (planned,), (budget,) = (
            report.measured_peak_bytes, report.planned_peak_bytes, report.budget_bytes
        )  # fmt: skip
        between = ROWS * SIZE * 4 if NEW and name == SPLIT[0] else 0
        assert measured <= (budget + between if NEW else 1.002 * planned), share
        assert measured <= budget * (1 + 1e-9) + between, share


def warned(budget, least):
    """What a plan says of whose second step a rank takes more than its budget."""
    schedule = stepped("ScheduleGPipe", "nested", budget, 4)
    following = schedule._phase
    assert following.fitted.least_bytes == least
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        following.count(following.plan.schedule, {phases.Action(0, phases.Kind.FORWARD, 0): phases.Level(4e9, 0.0)}, {})
    (text,) = [str(each.message) for each in caught]
    return text


def test_advice_is_never_below_the_least():
    with pytest.raises(BudgetInfeasible) as caught:
        stepped("ScheduleGPipe", "nested", 1000)
    least = caught.value.least_bytes
    asked = re.search(r"works:    recompute_ahead\(schedule, budget=(\d+)\)", warned(1.5 * least, least))
    assert int(asked[1]) == least
    assert "works:    fewer micro-batches in flight, or smaller ones" in warned(int(asked[1]), least)
    assert f"budget={9e18 / 4e9:.0f})" in warned(3e9, least)
