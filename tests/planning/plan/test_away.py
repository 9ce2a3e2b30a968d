"""Plans that the search with a host finds: the published figures, and what holds of every one of them."""
from __future__ import annotations

import math
from random import Random

import pytest

from tests.planning.plan.published import AWAY, CASES
from tests.planning.plan.random_pipelines import random_pipeline
from tests.planning.plan.recount_moves import recount
from torchckpt.planning import Block, Host, Stage, fixed, one_f_one_b, zbv
from torchckpt.planning.plan import plan_pipeline
from torchckpt.planning.plan.away import Simulator, _away
from torchckpt.planning.plan.away.rank import Gene, Habits
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
    ("A", 20, 1), ("A", 30, 2), ("A", 50, 2), ("D", 30, 2), ("F", 30, 2),
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


@pytest.mark.slow
@pytest.mark.parametrize(("copy", "published"), [(0.25, 14.9), (0.5, 17.0)])
def test_fast_copies_where_memory_is_least(copy, published):
    schedule, stages, link = CASES["E"]
    plan = checked(plan_pipeline(schedule, stages, "10%", link, host=Host(1e9, out=1 / copy)))
    assert 100 * plan.overhead(plan.step_seconds) <= published + 0.55


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


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_chosen_a_rank_keeps_to_its_budget(seed):
    """Also where it waits for a copy out at the boundary at which it takes memory for several copies back."""
    random = Random(seed)
    after = fixed(1.0, 1.0, 1.0, random.choice((0.0, 2.0)))
    stage = Stage((Block(boundary_bytes=0.06),) * random.choice((2, 3)), after=after)
    schedule = random.choice((one_f_one_b, zbv))(random.choice((1, 2, 3)), 6)
    host = Host(1000, random.choice((0.5, 1.0)), random.choice((0.5, 1.0)))
    problem = problem_of(schedule, stage, random.choice(("30%", "50%")), 0.0, host)
    simulator = Simulator(problem, host)
    times = simulator.times(simulator.play(simulator.ideal(0)))
    for _ in range(10):
        genes = []
        for lane, of_rank in zip(problem.lanes, times):
            away = [random.randint(0, len(stage.blocks)) for _ in lane.visits]
            dropped = [random.randint(0, len(stage.blocks) - blocks) for blocks in away]
            habits = Habits(random.choice((0.0, 8.0)), math.inf, pending=random.choice((-1, 0, 9)))
            genes.append(Gene(away, dropped, habits, of_rank, times[0].starts[-1]))
        if played := simulator.play(genes):
            schedule, choices, moves = _away(problem, played.ranks)
            step = problem.step(choices, schedule, moves)
            for peak, budget in zip(step.peak_bytes, problem.budget_bytes):
                assert peak <= budget * (1 + 1e-9)
