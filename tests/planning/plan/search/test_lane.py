"""What a rank keeps: within its budget, and for equal blocks as much as can be kept."""
from __future__ import annotations

from itertools import product

import pytest

from torchckpt.planning import Block, Stage
from torchckpt.planning.order.schedules import named_schedule
from torchckpt.planning.plan.search.lane import CHOICES, DROP_ORDERS, Holdings, Lane

CELLS = [("1f1b", 3, 5), ("1f1b", 4, 4), ("gpipe", 2, 4), ("zbv", 2, 2), ("interleaved_1f1b", 2, 2)]


def most_kept(lane):
    """Over all numbers of blocks that each visit keeps."""
    levels = [own.levels["first"] for own in lane.holdings]
    fitting = (held for held in product(*levels) if max(lane.profile(held)) <= lane.budget_bytes)
    return max((sum(one.kept for one in held) for held in fitting), default=None)


@pytest.mark.parametrize("budget", [1.0, 1.5, 2.25, 3.0, 4.5])
@pytest.mark.parametrize(("name", "p", "m"), CELLS)
def test_of_equal_blocks_as_many_are_kept_as_can_be(name, p, m, budget):
    schedule = named_schedule(name, p, m)
    holdings = [Holdings(Stage((Block(boundary_bytes=0.25),) * 2))] * schedule.stages
    for lane in (Lane(rank, schedule, holdings, budget) for rank in range(len(schedule.ranks))):
        best = most_kept(lane)
        if best is not None:
            assert sum(one.kept for one in lane.keep(lane.reserve(0, 0, "first", "last"))) == best


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("order", DROP_ORDERS)
@pytest.mark.parametrize("early", [0, 1, 3])
def test_what_is_kept_fits(choice, order, early):
    blocks = (Block(1, 1, 1, 1, 2.0, 0.5), Block(2, 2, 2, 2, 1.0, 0.25), Block(1, 1, 1, 3, 1.5, 0.0))
    schedule = named_schedule("zbv", 3, 6)
    holdings = [Holdings(Stage(blocks))] * schedule.stages
    for lane in (Lane(rank, schedule, holdings, 9.0) for rank in range(3)):
        held = lane.keep(lane.reserve(early, 2, order, choice))
        assert max(lane.profile(held)) <= 9.0


def test_the_one_that_is_used_last_is_dropped():
    schedule = named_schedule("gpipe", 1, 3)
    lane = Lane(0, schedule, [Holdings(Stage((Block(),) * 2))], 4.0)
    held = lane.keep(lane.reserve(0, 0, "first", "last"))
    assert [one.kept for one in held] == [2, 2, 0]
    held = lane.keep(lane.reserve(0, 0, "first", "even"))
    assert [one.kept for one in held] == [2, 1, 1]
