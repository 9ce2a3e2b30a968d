"""What one visit has in memory: the highest point of a backward, block by block."""
from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import pytest

from tests.planning.plan.exhaustive import backward_bytes
from tests.planning.plan.random_pipelines import random_stages
from torchckpt.planning import Block, Stage
from torchckpt.planning.plan.search.lane import DROP_ORDERS, Holdings, use_bytes


@pytest.mark.parametrize("seed", range(20))
def test_the_highest_point_of_a_backward(seed):
    for stage in random_stages(Random(seed), 2, 5):
        every = range(len(stage.blocks))
        for count in range(len(stage.blocks) + 1):
            for late in combinations(every, count):
                assert use_bytes(stage, late) == pytest.approx(backward_bytes(stage, frozenset(late)))


@pytest.mark.parametrize("seed", range(20))
def test_a_visit_holds_less_and_less(seed):
    holdings = Holdings(random_stages(Random(seed), 1, 6)[0])
    for name in DROP_ORDERS:
        held = [level.held_bytes for level in holdings.levels[name]]
        assert held == sorted(held, reverse=True)
        assert held[0] == pytest.approx(holdings.full_bytes)
        assert held[-1] == pytest.approx(holdings.stage.least_bytes)
        for level in holdings.levels[name]:
            assert level.use_bytes == pytest.approx(sorted(level.use_bytes))
            for early in range(len(level.dropped) + 1):
                both = level.early_seconds[early] + level.late_seconds[early]
                assert both == pytest.approx(level.late_seconds[0])


def test_what_frees_nothing_is_not_dropped():
    holdings = Holdings(Stage((Block(), Block(boundary_bytes=1.0), Block())))
    assert holdings.droppable == 2
    assert {level.dropped for level in holdings.levels["first"]} == {(), (0,), (0, 2)}


def test_the_orders_in_which_blocks_are_dropped():
    blocks = (Block(recompute_seconds=3.0, saved_bytes=2.0), Block(recompute_seconds=1.0), Block(saved_bytes=4.0))
    orders = {
        name: tuple((set(after.dropped) - set(before.dropped)).pop() for before, after in pairwise(levels))
        for name, levels in Holdings(Stage(blocks)).levels.items()
    }
    assert orders == {
        "first": (0, 1, 2),
        "cheap": (2, 1, 0),
        "small": (1, 0, 2),
        "large": (2, 0, 1),
    }
