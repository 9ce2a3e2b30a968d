"""Plans that the search with a host finds: the published figures, and what holds of every one of them."""
from __future__ import annotations

import math
from random import Random

import pytest

from tests.planning.plan.published import AWAY, CASES
from tests.planning.plan.random_pipelines import random_pipeline
from tests.planning.plan.recount_moves import recount
from torchckpt.planning import Block, Host, Stage, one_f_one_b
from torchckpt.planning.plan import plan_pipeline
from torchckpt.planning.plan.problem import problem_of


def checked(plan):
    """The plan, whose figures another account of its step has found again."""
    counted = recount(plan.step)
    assert counted.step_seconds == pytest.approx(plan.step_seconds, rel=1e-9)
    assert plan.bound_seconds <= plan.step_seconds * (1 + 1e-9)
    for levels, budget in zip(counted.levels, plan.problem.budget_bytes):
        assert max((highest for highest, _ in levels.values()), default=0.0) <= budget * (1 + 1e-9)
    for held, room in zip(counted.host_bytes, plan.problem.host_bytes):
        assert held <= room * (1 + 1e-9)
    return plan


SLOW = pytest.mark.slow
CELLS = [
    ("A", 20, 1), ("A", 30, 2), ("A", 50, 2), ("D", 30, 2),
    pytest.param("A", 10, 1, marks=SLOW), pytest.param("F", 10, 1, marks=SLOW), pytest.param("E", 10, 2, marks=SLOW),
    pytest.param("B", 10, 2, marks=SLOW), pytest.param("B", 10, 4, marks=SLOW), pytest.param("A", 30, 4, marks=SLOW),
    pytest.param("B", 30, 4, marks=SLOW), pytest.param("C", 30, 4, marks=SLOW),
]


@pytest.mark.parametrize(("case", "share", "copy"), CELLS)
def test_no_longer_than_published(case, share, copy):
    schedule, stages, link = CASES[case]
    plan = checked(plan_pipeline(schedule, stages, f"{share}%", link, host=Host(1e9, out=1 / copy)))
    published = AWAY[case][share][copy.bit_length() - 1]
    assert 100 * plan.overhead(plan.step_seconds) <= published + (0.55 if copy < 4 else 1.55)


def random_host(random, problem):
    """Slow and fast, one engine or two, with drag or without, from a byte to all bytes of a rank."""
    blocks = [block for stage in problem.stages for block in stage.blocks]
    rate = sum(block.saved_bytes for block in blocks) / sum(block.forward_seconds for block in blocks)
    out, back = (rate / random.choice((0.3, 1.0, 2.0, 4.0)) for _ in range(2))
    most = max(problem.keep_all.peak_bytes)
    room = max(1.0, most * random.choice((0.01, 0.1, 0.3, 1.0)))
    return Host(room, out, back, half_duplex=random.random() < 0.3, drag=random.choice((0.0, 0.0, 0.05)))


@pytest.mark.parametrize(
    "seeds", [range(6), *(pytest.param(range(low, low + 40), marks=SLOW) for low in range(0, 200, 40))]
)
def test_random_hosts(seeds):
    moving = 0
    for seed in seeds:
        random = Random(seed)
        schedule, stages, budget, link = random_pipeline(random, 40)
        budget = [max(1.0, each) for each in budget] if isinstance(budget, list) else max(1.0, budget)
        host = random_host(random, problem_of(schedule, stages, budget, link))
        plan = checked(plan_pipeline(schedule, stages, budget, link, host=host))
        alone = plan_pipeline(schedule, stages, budget, link)
        assert math.isfinite(plan.step_seconds)
        assert plan.step_seconds <= alone.step_seconds * (1 + 1e-9)
        moving += bool(plan.moves)
    assert moving >= len(seeds) // 4


def test_a_host_without_room_changes_nothing():
    stages = [Stage((Block(saved_bytes=4.0, boundary_bytes=0.25),) * 4)] * 2
    alone = plan_pipeline(one_f_one_b(2, 3), stages, "50%")
    plan = checked(plan_pipeline(one_f_one_b(2, 3), stages, "50%", host=Host(1, out=1.0)))
    assert not plan.moves
    assert (plan.step_seconds, plan.choices) == (alone.step_seconds, alone.choices)
