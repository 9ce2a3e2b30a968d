"""A plan that exceeds a budget, and one that leaves most of it, one visit at a time."""
from __future__ import annotations

import random

import pytest

from tests.slow import few
from torchckpt.planning import Block, Choice, Link, Stage, State, one_f_one_b, zero_bubble
from torchckpt.planning.plan.problem import problem_of
from torchckpt.planning.plan.result import PipelinePlan
from torchckpt.planning.plan.run.extra_memory import ExtraMemory, peaks_of
from torchckpt.planning.plan.run.repair import repaired
from torchckpt.planning.step.placement import recomputed_early, with_recompute


def plan_of(seed, make, state):
    """A plan that does the same with every block, of random blocks."""
    draw = random.Random(seed)
    stages = [
        Stage(tuple(Block(1.0, 1.0, 1.0, draw.uniform(0.5, 2), draw.randrange(50, 100), 5.0) for _ in range(3)))
        for _ in range(3)
    ]
    schedule = make(3, 6)
    problem = problem_of(schedule, stages, "100%", [Link()] * 2)
    choices = {(j, i): Choice.all(state, 3) for j in range(3) for i in range(6)}
    return PipelinePlan.of(problem, with_recompute(schedule, choices), choices)


def peaks(plan, beside):
    return peaks_of(plan.step, beside)


@few(3)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("make", [one_f_one_b, zero_bubble])
@pytest.mark.parametrize("state", [State.KEPT, State.EARLY])
def test_it_fits_afterwards_and_is_shorter_than_recomputing_all(seed, make, state):
    plan, late = plan_of(seed, make, state), plan_of(seed, make, State.LATE)
    beside = {action: ExtraMemory(20.0, 0.0) for order in plan.schedule.ranks for action in order}
    kept = plan_of(seed, make, State.KEPT)
    limits = [(low + high) / 2 for low, high in zip(peaks(late, beside), peaks(kept, beside))]
    found = repaired(plan, limits, beside)
    assert all(peak <= limit for peak, limit in zip(peaks(found, beside), limits))
    assert found.step_seconds < late.step_seconds
    early = {visit for visit in found.choices if found.step.choice(visit).early}
    assert recomputed_early(found.schedule) == early


def test_what_fits_and_cannot_be_shorter_stays():
    plan = plan_of(0, one_f_one_b, State.KEPT)
    assert repaired(plan, [1e9] * 3, {}) == plan


def test_nothing_fits():
    assert repaired(plan_of(0, one_f_one_b, State.KEPT), [10.0] * 3, {}) is None


def test_the_step_gets_shorter_where_bytes_are_left():
    plan = plan_of(1, one_f_one_b, State.LATE)
    limits = [peak * 2 for peak in peaks(plan, {})]
    found = repaired(plan, limits, {})
    assert found.step_seconds < plan.step_seconds
    assert all(peak <= limit for peak, limit in zip(peaks(found, {}), limits))
