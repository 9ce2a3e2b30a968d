"""What recompute_ahead is given to plan with: every fault has its text."""
from __future__ import annotations

import re

import pytest

from tests.distributed.stages import Blocks, schedule_on, stages_of
from torchckpt.distributed import recompute_ahead, schedule_of
from torchckpt.distributed.within import RecomputeWithin
from torchckpt.errors import ArgumentError
from torchckpt.planning import Block, Stage, gpipe, one_f_one_b
from torchckpt.planning.plan import plan_pipeline

pytestmark = pytest.mark.usefixtures("alone")

PLAN_WORKS = (
    "plan=plan_pipeline(schedule_of(schedule), stages, budget), or its to_json() text, or a file with that text"
)
VERY = "the plan was made for another schedule"
MAKE = "plan_pipeline(schedule_of(schedule), stages, budget)"


def live(name="ScheduleGPipe", m=4):
    return schedule_on(stages_of(name, Blocks), name, m)


def plan_of(schedule):
    return plan_pipeline(schedule, [Stage((Block(boundary_bytes=0.1),) * 2)] * schedule.stages, "60%")


def error_of(**options):
    with pytest.raises(ArgumentError) as caught:
        recompute_ahead(live(), **options)
    return str(caught.value)


def fault(rule, received, works):
    return f"recompute_ahead(): {rule}\n  received: {received}\n  works:    {works}"


@pytest.mark.parametrize("budget", ["1GiB", "50%", 1e9, 12345, ["1GB"]])
def test_budgets(budget):
    schedule = recompute_ahead(live(), budget=budget)
    assert type(schedule) is RecomputeWithin
    assert schedule.plan is None


HUGE = 10**400
NO_BUDGETS = [HUGE, f"{HUGE}GB", "sixty", "-1GB", "", -1, 0, float("nan"), float("inf"), True, "0%", ["x"]]


@pytest.mark.parametrize("budget", NO_BUDGETS)
def test_what_is_no_budget(budget):
    name, value = ("budget[0]", budget[0]) if isinstance(budget, list) else ("budget", budget)
    rule = "the budget is not bytes above 0, a size with a unit such as kB, MiB or GB, or a share in percent"
    text = error_of(budget=budget)
    assert text.startswith(f"recompute_ahead(): {rule}\n  received: {name}={value!r}\n  works:    budget=")


@pytest.mark.parametrize(("budget", "received"), [(["1GB"] * 2, "2 budgets"), ([], "0 budgets"), ({}, "budget={}")])
def test_a_list_of_the_wrong_length(budget, received):
    text = error_of(budget=budget)
    rule = "the budget is neither one for every rank nor a list of 1"
    assert f"{rule}\n  received: {received}\n  works:    budget=" in text


def test_budget_and_plan():
    text = error_of(budget="1GB", plan=plan_of(gpipe(1, 4)))
    assert text == fault("both a budget and a plan are given", "budget='1GB' and a plan", "budget=... or plan=...")


@pytest.mark.parametrize(
    ("options", "received"),
    [
        ({"segments": 1}, "a budget and segments=1"),
        ({"exempt": "none"}, "a budget and exempt='none'"),
        ({"costs": "measured"}, "a budget and costs='measured'"),
        ({"segments": 2, "costs": Block()}, f"a budget and segments=2, costs={Block()!r}"),
    ],
)
def test_what_a_plan_decides(options, received):
    rule = f"{', '.join(options)} cannot go with a budget, which decides what is kept and what is recomputed early"
    works = 'recompute_ahead(schedule, budget="60GiB")'
    assert error_of(budget="1GB", **options) == fault(rule, received, works)


def test_what_is_no_plan():
    assert error_of(plan=3) == fault("the plan is neither a PipelinePlan nor its JSON text", "int", PLAN_WORKS)


def test_a_file_that_is_not_there():
    rule = "the plan is neither JSON nor a file that can be read"
    assert error_of(plan="nowhere.json") == fault(rule, "'nowhere.json': No such file or directory", PLAN_WORKS)


def test_json_of_something_else():
    text = error_of(plan='{"format": 7}')
    assert text.startswith("recompute_ahead(): the text is no plan that to_json() wrote\n  received: format 7\n")


@pytest.mark.parametrize(
    ("schedule", "received"),
    [
        (gpipe(1, 5), "a plan of 5 micro-batches for one of 4"),
        (gpipe(2, 4), "a plan of 2 stages for one of 1, of 2 ranks for one of 1"),
        (gpipe(2, 3), "a plan of 2 stages for one of 1, of 3 micro-batches for one of 4, of 2 ranks for one of 1"),
        (one_f_one_b(1, 4), "a plan of another '1f1b': action 1 of rank 0 is 0B0 in the plan, 0F1 in the schedule"),
    ],
)
def test_a_plan_for_another_schedule(schedule, received):
    assert error_of(plan=plan_of(schedule)) == fault(VERY, received, MAKE)


def test_the_schedule_that_is_returned_recomputes_already():
    with pytest.raises(ArgumentError, match=re.escape("the schedule recomputes ahead already")):
        recompute_ahead(recompute_ahead(live(), budget="1GB"), budget="1GB")


def test_a_schedule_that_recomputes_is_not_planned():
    schedule = recompute_ahead(live(), exempt="none").schedule
    with pytest.raises(ArgumentError, match="the schedule has R already, but the plan says what is recomputed"):
        plan_of(schedule)
    assert recompute_ahead(live(), plan=plan_of(schedule_of(live()))).plan is not None


@pytest.mark.parametrize("name", ["latin", "nul"])
def test_a_file_that_is_no_text(name, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes("\xe9".encode("latin-1"))
    text = error_of(plan=path if name == "latin" else "a\0b")
    assert text.startswith("recompute_ahead(): the plan is neither JSON nor a file that can be read\n")
