from __future__ import annotations

import math

import pytest

from tests.planning.remat.brute_force import fastest
from tests.planning.remat.flows import random_dag
from tests.planning.remat.random_flows import random_flow
from torchckpt.planning.remat.flow.dataflow import Tables
from torchckpt.planning.remat.flow.memory import simulate
from torchckpt.planning.remat.search.planner import solution
from torchckpt.planning.remat.search.shortest import Shortest


@pytest.mark.parametrize("seed", range(30, 50))
def test_it_is_as_fast_as_brute_force(seed: int) -> None:
    for flow in (random_flow(seed, 9), random_dag(7, seed)):
        eager_bytes = simulate(flow, flow.eager).peak_bytes
        for share in (1.0, 0.85, 0.7, 0.55):
            budget = int(share * eager_bytes)
            best = fastest(flow, budget)
            schedule = Shortest(Tables(flow), budget, math.inf, 100_000).run()
            assert (schedule is None) == (best is None)
            if schedule and best:
                assert solution(flow, schedule).peak_bytes <= budget
                assert solution(flow, schedule).seconds == pytest.approx(best[0])


def test_it_gives_up_after_so_many_states_and_beyond_a_cost() -> None:
    flow = random_dag(8, seed=3)
    tables, budget = Tables(flow), simulate(flow, flow.eager).peak_bytes
    assert Shortest(tables, budget, math.inf, 100).run()
    assert Shortest(tables, budget, math.inf, 3).run() is None
    assert Shortest(tables, budget, 0.0, 100).run() is None
