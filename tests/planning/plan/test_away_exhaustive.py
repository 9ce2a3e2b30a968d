"""Tiny pipelines with a host: the plan is the shortest there is, and the bound is never above that."""
from __future__ import annotations

from itertools import product

import pytest

from tests.planning.plan.exhaustive_away import Pipeline
from torchckpt.planning import Block, Host, Stage, one_f_one_b
from torchckpt.planning.plan import plan_pipeline

SIZES = [(1, 1, 2), (2, 2, 1), (2, 3, 1)]
MORE = [
    (1, 1, 1), (1, 2, 1), (1, 2, 2), (1, 3, 1), (1, 3, 2), (2, 2, 2), (2, 3, 2), (1, 2, 3), (1, 1, 4), (2, 2, 3),
    (2, 4, 1), (2, 4, 2), (2, 6, 1), (3, 3, 1), (3, 6, 1),
]
"""Ranks, micro-batches, blocks of a stage. In all 87 problems."""
LONGER = {(2, 4, 2, 2, 1): (36, 35)}
"""The one plan that is not the shortest, with copies of two forwards and room for one block: its step, the shortest."""


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [SIZES, pytest.param(MORE, marks=pytest.mark.slow)])
def test_every_plan_is_the_shortest(sizes):
    for (p, m, n), k, budget in product(sizes, (1, 2, 4), (1, 2, 3, 4)):
        if budget >= min(p, m) * n:
            continue
        stages = [Stage((Block(boundary_bytes=0.0, moved_bytes=1.0),) * n)] * p
        plan = plan_pipeline(one_f_one_b(p, m), stages, float(budget), host=Host(1e9, out=1 / k))
        shortest = Pipeline(p, m, n, budget, k).shortest(below=round(plan.step_seconds))
        assert plan.bound_seconds <= (plan.step_seconds if shortest is None else shortest) + 1e-6
        assert shortest is None or (plan.step_seconds, shortest) == LONGER.get((p, m, n, k, budget))
