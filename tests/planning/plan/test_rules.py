"""The rules that a plan is compared with cost less than the plan."""
from __future__ import annotations

import pytest

from tests.planning.plan.published import BLOCK
from tests.slow import few
from torchckpt.planning import Stage
from torchckpt.planning.order.schedules import named_schedule
from torchckpt.planning.plan import figures
from torchckpt.planning.plan.problem import problem_of
from torchckpt.planning.step import simulated as module
from torchckpt.planning.work.choice import first_blocks


def problem(name, p, m, budget):
    schedule = named_schedule(name, p, m)
    return problem_of(schedule, [Stage((BLOCK,) * 4)] * schedule.stages, budget, 0.25)


@few(1)
@pytest.mark.parametrize("name", ["zbv", "zero_bubble", "1f1b"])
def test_they_simulate_few_steps(name, monkeypatch):
    """It was one for each count of blocks and of weight gradients that wait: 85 steps here, 400 of p 16 m 256."""
    asked, counted = problem(name, 8, 32, "50%"), []
    simulated = module.run
    monkeypatch.setattr(module, "run", lambda program: counted.append(program) or simulated(program))
    figures.within_budget(asked, [4])
    figures.within_budget(asked, range(5))
    actions = sum(map(len, asked.schedule.ranks))
    assert len(counted) * actions <= 2 * (figures._WORK + actions)


@pytest.mark.parametrize("name", ["zbv", "zero_bubble", "1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("share", ["35%", "60%", "90%"])
def test_the_best_of_all_counts(name, share):
    asked = problem(name, 3, 6, share)
    found, every = figures.within_budget(asked, range(5)), []
    for schedule in figures._delays(asked.schedule):
        for blocks in range(5):
            step = asked.step(first_blocks(schedule, asked.stages, blocks), schedule)
            if all(peak <= lane.budget_bytes for peak, lane in zip(step.peak_bytes, asked.lanes)):
                every.append((step.seconds, blocks))
    assert (found.step_seconds, found.blocks) == min(every, default=(float("inf"), 0))
