"""Plans that the search with a host finds: the published figures, and what holds of every one of them."""
from __future__ import annotations

import math
from collections import deque
from random import Random

import pytest

from tests.planning.plan.published import AWAY, CASES
from tests.planning.plan.random_pipelines import random_pipeline
from tests.planning.plan.recount_moves import recount
from tests.slow import few
from torchckpt.planning import Block, Host, Stage, fixed, gpipe, one_f_one_b, zbv
from torchckpt.planning.order.schedules import named_schedule
from torchckpt.planning.plan import plan_pipeline
from torchckpt.planning.plan.away import Simulator, _away
from torchckpt.planning.plan.away.outlook import Gene, Habits
from torchckpt.planning.plan.problem import problem_of
from torchckpt.planning.plan.search.lane import BACKWARD


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
    pytest.param("A", 10, 1, marks=SLOW), pytest.param("F", 30, 2, marks=SLOW),
    pytest.param("F", 10, 1, marks=SLOW), pytest.param("E", 10, 2, marks=SLOW),
    pytest.param("B", 10, 2, marks=SLOW), pytest.param("B", 10, 4, marks=SLOW), pytest.param("A", 30, 4, marks=SLOW),
    pytest.param("B", 30, 4, marks=SLOW), pytest.param("C", 30, 4, marks=SLOW),
]


@few(1)
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


def test_a_recompute_that_waits_for_a_copy_out_begins_no_sooner_by_an_error_of_rounding():
    """3.35 + (7.55 - 3.35) < 7.55: what left then was still here."""
    host = Host(1000, 1.0)
    problem = problem_of(gpipe(1, 2), Stage((Block(boundary_bytes=0.125),) * 3), "100%", 0.0, host)
    simulator = Simulator(problem, host)
    (times,) = simulator.times(simulator.play(simulator.ideal(0)))
    rank = simulator._rank(0, Gene([1, 1], [2, 2], Habits(), times, 100.0), math.inf)
    for place in range(2):
        rank(times.starts[place])
    assert rank.dropped[0] == 2
    rank.clock, rank.message, rank.leaving = 3.35, 20.0, deque([(7.55, 1.5, 1, 0)])
    rank.bytes, rank.budget, rank.levels = 2.0, 2.25, [0.0] * len(rank.levels)
    rank._fill(BACKWARD, 0)
    assert (rank.bytes, rank.clock) == (2.25, 9.55)


@few(1)
@pytest.mark.parametrize("seed", [26, 161, 188, 315])
def test_whatever_is_chosen_the_search_counts_as_the_step_does(seed):
    """Also where a recompute waits for copies out, and a copy back is issued, and (315) where a block moves nothing."""
    random = Random(seed)
    schedule = named_schedule(random.choice(("1f1b", "gpipe", "zero_bubble", "zbv")), random.choice((2, 3)), 4)
    stages = [Stage(tuple(_random_block(random) for _ in range(random.choice((2, 4))))) for _ in range(schedule.stages)]
    host = Host(1000, random.choice((0.25, 0.5, 1.1)), random.choice((0.5, 2.0)), random.random() < 0.3)
    problem = problem_of(schedule, stages, "100%", random.choice((0.0, 1.0, 3.0)), host)
    pairs = zip(problem.keep_all.peak_bytes, problem.least_bytes)
    problem = problem.within([least + (most - least) * random.choice((0.05, 0.3)) for most, least in pairs])
    simulator = Simulator(problem, host)
    times = simulator.times(simulator.play(simulator.ideal(0)))
    for _ in range(30):
        genes = []
        for works, of_rank in zip(simulator.works, times):
            away = [random.randint(0, min(work.blocks, 2)) for work in works]
            dropped = [random.randint(0, work.blocks - blocks) for work, blocks in zip(works, away)]
            pending = random.choice((-1, 0, 9))
            habits = Habits(random.choice((0.0, 8.0)), random.choice((0.0, math.inf)), pending=pending)
            genes.append(Gene(away, dropped, habits, of_rank, max(of_rank.starts)))
        if played := simulator.play(genes):
            planned, choices, moves = _away(problem, played.ranks)
            step = problem.step(choices, planned, moves)
            assert step.seconds == pytest.approx(played.key[0], rel=1e-12)
            assert all(peak <= budget * (1 + 1e-9) for peak, budget in zip(step.peak_bytes, problem.budget_bytes))
            backs = [copy for copy in step.timeline.copies if copy.is_back]
            came = [_came(problem.lanes[copy.rank], played.ranks[copy.rank], copy) for copy in backs]
            assert came == pytest.approx([copy.end_seconds for copy in backs], rel=1e-12)


def _came(lane, rank, copy):
    return rank.back[lane.visits.index((copy.stage, copy.micro_batch)), copy.block]


def _random_block(random):
    saved = random.choice((0.5, 1.0, 1.1))
    moved = random.choice((0.0, None, None))
    return Block(*[random.choice((0.1, 0.5, 1.0)) for _ in range(4)], saved, 0.125 * saved, moved_bytes=moved)
