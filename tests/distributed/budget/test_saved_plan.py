"""The plan of a run, saved and loaded: its budget is that of a whole step, as it was when the plan was made."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.stages import Blocks, batch, schedule_on, stages_of, step
from tests.settings import with_gloo
from torchckpt.__main__ import main
from torchckpt.distributed import recompute_ahead
from torchckpt.planning import Block, Stage
from torchckpt.planning.plan import PipelinePlan, plan_pipeline

pytestmark = with_gloo


def run(steps, rows=64, **arguments):
    stages = stages_of("ScheduleGPipe", Blocks)
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 4), **arguments)
    for _ in range(steps):
        step(schedule, stages, *batch(4, rows))
    return schedule


@pytest.mark.usefixtures("alone")
def test_a_loaded_plan_whose_steps_take_more_than_it_says_is_for_another_shape():
    plan = run(5, budget="90%").plan
    text = (
        r"^recompute_ahead: a step takes more than the plan that was given says, as one for other shapes does\n"
        r"  received: rank 0 \(stages 0\): (\d+) bytes measured, (\d+) planned, budget (\d+)\n"
        r"  works:    recompute_ahead\(schedule, budget=\.\.\.\)$"
    )
    with pytest.warns(UserWarning, match=text) as warned:
        run(3, 128, plan=plan.to_json())
    assert [Path(warning.filename).name for warning in warned] == ["stages.py"]  # where step() is called
    run(3, 32, plan=plan)
    on_paper = plan_pipeline(plan.problem.schedule, [Stage((Block(),) * 2)], "100%")
    run(3, 128, plan=on_paper)  # in units


@pytest.mark.usefixtures("alone")
def test_what_the_command_prints_is_a_plan(capsys, tmp_path):
    arguments = "--schedule gpipe --stages 1 --microbatches 4 --blocks 2 --budget 60% --json"
    assert main(["plan", *arguments.split()]) == 0
    path = tmp_path / "plan.json"
    path.write_text(capsys.readouterr().out)
    schedule = run(2, plan=path)
    assert 0 < schedule.plan.recomputed_share < 1
    assert run(2, plan=path.read_text()).plan == schedule.plan


@pytest.mark.usefixtures("alone")
def test_a_step_that_takes_more_than_its_budget_is_told():
    class Grows(Blocks):
        steps = 0

        def forward(self, x):
            self.steps += 1
            more = torch.ones(100_000) if self.steps > 20 else None  # of the sixth step
            return super().forward(x) + (0.0 if more is None else more.sum() * 0.0)

    stages = stages_of("ScheduleGPipe", Grows)
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 4), budget="100%")
    for _ in range(5):
        step(schedule, stages, *batch(4, 64))
    limit = schedule.plan.whole_step.budget_bytes[0]
    text = r"more than its budget, and than .*\n.*\n  works: .*, budget=\d+\)$"
    with pytest.warns(UserWarning, match=text) as warned:
        step(schedule, stages, *batch(4, 64))
    assert int(str(warned[0].message).rpartition("=")[2][:-1]) < limit


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
