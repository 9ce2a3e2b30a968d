"""The plan of a run, saved and loaded: its budget is that of a whole step, as it was when the plan was made."""
from __future__ import annotations

import pytest

from tests.distributed.stages import Blocks, batch, schedule_on, stages_of, step
from tests.settings import with_gloo
from torchckpt.distributed import recompute_ahead
from torchckpt.planning.plan import PipelinePlan

pytestmark = with_gloo


def run(steps, **arguments):
    stages = stages_of("ScheduleGPipe", Blocks)
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 4), **arguments)
    for _ in range(steps):
        step(schedule, stages, *batch(4, 64))
    return schedule


@pytest.mark.usefixtures("alone")
def test_a_loaded_plan_reports_the_budget_that_it_was_made_for():
    made = run(6, budget="90%")
    report = made.report()
    assert made.plan.problem.budget_bytes < report.budget_bytes  # of activations, and of all
    loaded = PipelinePlan.from_json(made.plan.to_json())
    assert loaded == made.plan
    assert loaded.whole_step == (report.budget_bytes, report.planned_peak_bytes)
    again = run(2, plan=loaded).report()
    assert again.budget_bytes == report.budget_bytes
    assert again.planned_peak_bytes == report.planned_peak_bytes
    assert again.measured_peak_bytes <= again.budget_bytes
