"""Blocks moved between stages: never worse, as good as published; and every schedule that fits."""
from __future__ import annotations

import pytest

from tests.planning.plan.published import CASES, FIGURES, gpt
from tests.planning.plan.recount import recount
from tests.slow import few
from torchckpt.errors import ArgumentError, BudgetInfeasible
from torchckpt.planning import Stage, fixed, one_f_one_b
from torchckpt.planning.plan import plan_pipeline
from torchckpt.planning.plan.every import plan_every


@few(1)
@pytest.mark.parametrize(
    ("case", "share"),
    [
        pytest.param(case, share, marks=() if case in "ADE" and (case, share) != ("E", 30) else pytest.mark.slow)
        for case in CASES
        for share in (30, 50, 70)
    ],
)
def test_no_longer_than_published_with_moves(case, share):
    schedule, stages, link = CASES[case]
    plan = plan_pipeline(schedule, stages, f"{share}%", link, balance=True)
    assert round(100 * plan.overhead(plan.step_seconds), 1) <= FIGURES[case][share][-1]
    assert sum(plan.balance) == sum(len(stage.blocks) for stage in stages)
    counted = recount(plan)
    assert plan.bound_seconds * (1 - 1e-9) <= counted.step_seconds == pytest.approx(plan.step_seconds)
    assert all(peak <= budget * (1 + 1e-9) for peak, budget in zip(counted.peak_bytes, plan.problem.budget_bytes))


def test_moves_do_not_hide_a_budget_that_is_too_small():
    schedule, stages, _ = CASES["A"]
    with pytest.raises(BudgetInfeasible):
        plan_pipeline(schedule, stages, "0.1B", balance=True)


def test_the_picture_has_the_step_that_was_asked_beside_the_planned_one():
    plan = plan_pipeline(one_f_one_b(4, 8), gpt(9, 7, 5, 3), "40%", balance=True)
    given = plan.asked.keep_all
    share = 100 * plan.overhead(plan.step_seconds)
    assert share < -5
    picture = plan.draw()
    assert f"in place of {max(given.peak_bytes):.3g}, for {-share:.1f} % less time" in picture
    assert f">step {given.seconds:.3g}, " in picture
    assert f">step {plan.step_seconds:.3g} ({share:.1f} %), " in picture


def test_every_schedule():
    found = plan_every(gpt(4, 4, 4, 3), 8, "50%")
    steps = [plan.step_seconds for plan in found.plans]
    assert steps == sorted(steps)
    assert {(plan.schedule.name, plan.schedule.stages) for plan in found.plans} >= {
        ("1f1b", 4), ("zero_bubble", 4), ("interleaved_1f1b", 8), ("zbv", 8),
    }  # fmt: skip
    assert found.reference.schedule.name == "1f1b"
    for plan in found.plans:
        assert sum(plan.balance) == 15
        assert max(recount(plan).peak_bytes) <= found.plans[0].problem.budget_bytes[0] * (1 + 1e-9)
    lines = str(found).split("\n")
    assert lines[0].split() == ["schedule", "stages", "step", "over", "bound", "recomputed", "peak"]
    assert found.best is found.plans[0]
    assert "over 1f1b that keeps all" in lines
    assert found.too_small == ("gpipe", "looped_bfs")


def test_stages_that_cannot_be_cut_are_left_as_they_are():
    stages = gpt(4, 4, 4, 3)
    stages[1] = Stage(stages[1].blocks, fixed(0.1))
    assert {plan.schedule.stages for plan in plan_every(stages, 4, "90%").plans} == {4}


def test_no_schedule_fits():
    with pytest.raises(ArgumentError, match="ranks is not an integer >= 1"):
        plan_every(gpt(4, 4), 4, "50%", ranks=0)
    with pytest.raises(ArgumentError, match="no schedule has these counts"):
        plan_every([Stage(gpt(2, 2)[0].blocks, fixed(0.1), fixed(0.1))] * 3, 4, "50%", ranks=2)
    with pytest.raises(BudgetInfeasible):
        plan_every(gpt(4, 4), 4, "0.001B")
