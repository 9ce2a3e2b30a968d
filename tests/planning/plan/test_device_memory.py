"""The memory of devices as the limit: what parameters leave of it is the budget, wherever blocks are."""
from __future__ import annotations

from dataclasses import replace

import pytest

from tests.little import search_little
from tests.planning.plan.published import gpt
from tests.slow import few, slow
from torchckpt.errors import BudgetInfeasible
from torchckpt.planning import one_f_one_b
from torchckpt.planning.budget import DeviceMemory
from torchckpt.planning.plan import PipelinePlan, plan_pipeline
from torchckpt.planning.plan.every import plan_every
from torchckpt.planning.work.host import Host


def stages(*counts, static=3.0):
    """Each block with so many bytes of parameters."""
    found = gpt(*counts)
    return [replace(one, blocks=tuple(replace(block, static_bytes=static) for block in one.blocks)) for one in found]


@few(1)
@pytest.mark.parametrize("host", [None, Host(1e3, 10.0)])
@pytest.mark.parametrize("memory", [20.0, 4.0, *slow([20.5])])
def test_the_memory_that_is_enough(memory, host, monkeypatch):
    """With room for something beside the parameters, with none, and with too little for these."""
    search_little(monkeypatch.setattr)
    schedule, own = one_f_one_b(2, 4), stages(8, 8, static=2.5)
    with pytest.raises(BudgetInfeasible) as error:
        plan_pipeline(schedule, own, DeviceMemory(memory), host=host)
    least = error.value.least_bytes
    assert f"rank {error.value.rank} needs {least:g} bytes even if it recomputes everything" in str(error.value)
    assert f"received: {memory:g} bytes for rank" in str(error.value)
    assert "of which parameters, gradients and optimizer state take 20" in str(error.value)
    assert f"works:    DeviceMemory({least:g}) or more" in str(error.value)
    plan = plan_pipeline(schedule, own, DeviceMemory(least), host=host)
    assert max(map(sum, zip(plan.static_bytes, plan.peak_bytes))) <= least
    assert error.value.plan.step_seconds == plan.step_seconds


def test_a_plan_is_that_of_the_budgets_that_are_left():
    schedule, own = one_f_one_b(4, 8), stages(8, 8, 8, 7)
    plan = plan_pipeline(schedule, own, DeviceMemory(24.0 + 16.0))
    same = plan_pipeline(schedule, own, [16.0, 16.0, 16.0, 19.0])
    assert plan.problem.budget_bytes == (16.0, 16.0, 16.0, 19.0)
    assert (plan.step_seconds, plan.choices) == (same.step_seconds, same.choices)
    assert PipelinePlan.from_json(plan.to_json()).step_seconds == plan.step_seconds


def test_a_block_that_moves_takes_its_parameters_along():
    schedule, own = one_f_one_b(4, 8), stages(8, 8, 8, 7)
    plan = plan_pipeline(schedule, own, DeviceMemory(34.0), balance=True)
    assert plan.balance != (8, 8, 8, 7)
    for rank, blocks in enumerate(plan.balance):
        assert plan.problem.budget_bytes[rank] == 34.0 - 3.0 * blocks
        assert plan.peak_bytes[rank] + plan.static_bytes[rank] <= 34.0 + 1e-9
    assert PipelinePlan.from_json(plan.to_json()).step_seconds == plan.step_seconds
    assert plan.step_seconds <= plan_pipeline(schedule, own, DeviceMemory(34.0)).step_seconds


@pytest.mark.slow
def test_every_schedule_has_the_budgets_of_its_own_placement():
    found = plan_every(stages(4, 4, 4, 3), 8, DeviceMemory(20.0))
    assert {"1f1b", "zbv"} <= {plan.schedule.name for plan in found.plans}
    for plan in found.plans:
        assert all(
            budget + static == 20.0 for budget, static in zip(plan.problem.budget_bytes, plan.static_bytes)
        )
    with pytest.raises(BudgetInfeasible):
        plan_every(stages(4, 4, 4, 3), 8, DeviceMemory(12.0))


@pytest.mark.parametrize("budget", [10, 14, 20])
def test_whole_numbers_are_planned_as_any(budget):
    """They were not: sizes of equal blocks were taken for a list."""
    own = [replace(one, blocks=tuple(replace(block, saved_bytes=4, boundary_bytes=1) for block in one.blocks))
           for one in gpt(3, 3)]  # fmt: skip
    same = [replace(one, blocks=tuple(replace(block, saved_bytes=4.0, boundary_bytes=1.0) for block in one.blocks))
            for one in gpt(3, 3)]  # fmt: skip
    plans = [plan_pipeline(one_f_one_b(2, 4), one, budget) for one in (own, same)]
    assert plans[0].step_seconds == plans[1].step_seconds
    assert plans[0].bound_seconds == plans[1].bound_seconds
