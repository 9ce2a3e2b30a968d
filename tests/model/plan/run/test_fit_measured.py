"""A plan for all that a step takes: the budget holds, and what is left of it is used."""
from __future__ import annotations

import pytest

from torchckpt.errors import ArgumentError, BudgetInfeasible
from torchckpt.model import Link, one_f_one_b, zero_bubble
from torchckpt.model.plan import Block, Choice, PipelinePlan, Stage
from torchckpt.model.plan.run.extra_memory import MeasuredStep
from torchckpt.model.plan.run.fit_measured import fitted
from torchckpt.model.plan.search.replay import Level, levels

STAGES = [Stage((Block(saved_bytes=100.0, boundary_bytes=6.0),) * 4)] * 3
SCHEDULE = one_f_one_b(3, 6)
LINKS = [Link()] * 2


def step_with(beside, schedule=SCHEDULE):
    """A measured step that took ``beside(place)`` of an order above what its regions hold, and left half of it."""
    choices = {(j, i): Choice((), (), (0, 1, 2, 3)) for j in range(3) for i in range(schedule.micro_batches)}
    found = {}
    for order in schedule.ranks:
        for place, (action, said) in enumerate(zip(order, levels(order, STAGES, choices))):
            extra = float(beside(place))
            found[action] = Level(said.highest + extra, said.left + extra / 2)
    return MeasuredStep(schedule, choices, found)


def planned(budget, took, schedule=SCHEDULE):
    return fitted("plan()", schedule, STAGES, LINKS, budget, took)


@pytest.mark.parametrize("budget", [500, 700, 900, "60%", [900, 500, 400]])
@pytest.mark.parametrize("beside", [lambda place: 0, lambda place: 40, lambda place: 5 * place], ids=str)
def test_the_budget_holds_all_that_a_step_takes(budget, beside):
    found = planned(budget, step_with(beside))
    assert all(peak <= limit for peak, limit in zip(found.peak_bytes, found.budget_bytes))
    assert all(peak >= own for peak, own in zip(found.peak_bytes, found.plan.peak_bytes))


def test_a_share_is_one_of_a_step_that_keeps_all():
    """Of the first rank, which holds three micro-batches, and 40 bytes."""
    assert planned("50%", step_with(lambda place: 40)).budget_bytes == ((3 * 400 + 40) / 2,) * 3


def test_nothing_beside_is_the_plan_itself():
    found = planned(700, step_with(lambda place: 0))
    assert found.peak_bytes == found.plan.peak_bytes


def test_what_does_not_come_together_leaves_room():
    """At the end of the step 250 are beside, when there are few activations: a reserve of 250 would waste bytes."""
    took = step_with(lambda place: 250 if place > 10 else 0)
    assert took.most(STAGES) == [250] * 3
    found = planned(500, took)
    assert max(found.plan.problem.budget_bytes) > 500 - 250
    assert all(peak <= 500 for peak in found.peak_bytes)


def test_above_the_peak_nothing_is_recomputed():
    found = planned(5000, step_with(lambda place: 40))
    assert found.plan.recomputed_share == 0.0
    assert "everything fits, so nothing need be recomputed" in found.plan.summary


@pytest.mark.parametrize("beside", [lambda place: 0, lambda place: 40, lambda place: 20 * place], ids=str)
@pytest.mark.parametrize("make", [one_f_one_b, zero_bubble])
def test_below_the_least_is_an_error_and_the_least_is_none(beside, make):
    schedule = make(3, 6)
    took = step_with(beside, schedule) if make is one_f_one_b else step_with(lambda place: 40, schedule)
    with pytest.raises(BudgetInfeasible, match=r"^plan\(\): a budget holds what a step takes that") as error:
        planned(20, took, schedule)
    assert isinstance(error.value.plan, PipelinePlan)
    assert error.value.rank in (0, 1, 2)
    found = planned(error.value.least_bytes, took, schedule)
    assert max(found.peak_bytes) <= error.value.least_bytes * (1 + 1e-9)


def test_what_is_no_budget():
    with pytest.raises(ArgumentError, match=r"^plan\(\): a budget is bytes above 0"):
        planned(-1, step_with(lambda place: 0))
