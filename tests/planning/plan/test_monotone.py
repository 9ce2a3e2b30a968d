"""A plan for more memory is no longer."""
from __future__ import annotations

from random import Random

import pytest

from tests.planning.plan.random_pipelines import random_pipeline
from tests.slow import few, slow
from torchckpt.planning.plan import plan_pipeline
from torchckpt.planning.plan.problem import problem_of

NEAR = 1e-9


def steps_of(seed, shares):
    """Whether backwards are split; and the steps within so much of what lies between recomputing and keeping all."""
    schedule, stages, _, link = random_pipeline(Random(seed), 150)
    whole = problem_of(schedule, stages, "100%", link)
    least, most = max(whole.least_bytes), max(whole.keep_all.peak_bytes)
    budgets = [max(1.0, (least + (most - least) * share) * (1 + NEAR)) for share in shares]
    plans = [plan_pipeline(schedule, stages, budget, link) for budget in budgets]
    return any(any(lane.is_split) for lane in whole.lanes), [plan.step_seconds for plan in plans]


def check(seed, shares):
    is_split, steps = steps_of(seed, shares)
    shortest = steps[0]
    for step in steps[1:]:
        # Split backwards have weight gradients to move as well, by a search that is not exhaustive.
        assert step <= shortest * (1 + (0.02 if is_split else NEAR)), (seed, steps)
        shortest = min(shortest, step)


@pytest.mark.slow
def test_where_all_fits_more_is_recomputed_if_that_makes_room_for_weight_gradients():
    """It was 1426.9 for all the memory, and 1398.8 for less: nothing was searched where everything fits."""
    _, (less, most) = steps_of(8, [10 / 11, 1.0])
    assert most <= less * (1 + NEAR)


@few(2)
@pytest.mark.parametrize("seed", [0, 1, 2, 3, *slow([5])])
def test_random_pipelines(seed):
    check(seed, [0.0, 0.3, 0.6, 0.8, 1.0])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 36))
def test_many_random_pipelines(seed):
    check(seed, [at / 9 for at in range(10)])
