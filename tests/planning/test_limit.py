"""Budgets: what can be written, what is too much, what is too little."""
from __future__ import annotations

import re
from math import inf, nan

import pytest

from tests.numpy_numbers import np
from tests.planning.plan.published import gpt
from tests.planning.plan.recount import recount
from torchckpt.errors import ArgumentError, BudgetInfeasible
from torchckpt.planning import Block, Stage, one_f_one_b, zero_bubble
from torchckpt.planning.budget import bytes_per_rank
from torchckpt.planning.plan import plan_bound, plan_pipeline


@pytest.mark.parametrize(
    ("limit", "found"),
    [
        ("50%", (8000.0, 8000.0)),
        (" 12.5 % ", (2000.0, 2000.0)),
        ("2kB", (2000.0, 2000.0)),
        ("2KiB", (2048.0, 2048.0)),
        (2000, (2000.0, 2000.0)),
        (["50%", "1MB"], (8000.0, 1e6)),
        ((1, 2.5), (1.0, 2.5)),
        (np.int64(2000), (2000.0, 2000.0)),
        (np.float32(1.5), (1.5, 1.5)),
        ([np.float64(3.5), "150%"], (3.5, 24000.0)),
    ],
)
def test_what_a_budget_may_be(limit, found):
    assert bytes_per_rank(limit, 2, 16000.0) == found


@pytest.mark.parametrize(
    "limit", ["", "0%", "-5%", "5", "5 apples", "0GB", 0, 0.0, 0.5, -1, nan, inf, True, None, {}, [1], [1, 0]]
)
def test_what_it_may_not_be(limit):
    with pytest.raises(ArgumentError, match=r'works:    (budget="50%", or )?budget="60GB", budget="50%", budget=6e10'):
        bytes_per_rank(limit, 2, 16000.0)


def test_what_is_wrong_with_each_is_said():
    match = r"(?s)2 faults.*budget\[0\]='5' \(it has no unit\).*budget\[2\]='6G' \(G is not a unit\)"
    with pytest.raises(ArgumentError, match=match):
        bytes_per_rank(["5", "50%", "6G"], 3, 16000.0)


def test_above_the_peak_nothing_is_recomputed():
    schedule = zero_bubble(4, 8)
    plan = plan_pipeline(schedule, gpt(8, 8, 8, 7), "100%")
    assert plan.step_seconds <= plan.keep_all_seconds
    assert plan.recomputed_share == 0.0
    assert "everything fits, so nothing need be recomputed" in str(plan)


def test_below_the_least_the_rank_is_told_and_the_plan_that_works():
    schedule, stages = one_f_one_b(4, 8), gpt(8, 8, 8, 7)
    with pytest.raises(BudgetInfeasible, match=r"(?s)rank 0 needs 2.9.* 0; too little for rank 3, too") as caught:
        plan_pipeline(schedule, stages, 2.4)
    error = caught.value
    assert (error.rank, error.least_bytes) == (0, pytest.approx(4 * (8 * 0.06 + 0.02) + 0.94))
    assert max(recount(error.plan).peak_bytes) <= error.least_bytes * (1 + 1e-9)
    again = plan_pipeline(schedule, stages, error.least_bytes)
    assert again.step_seconds == error.plan.step_seconds
    with pytest.raises(BudgetInfeasible):
        plan_pipeline(schedule, stages, error.least_bytes * (1 - 1e-6))
    assert plan_bound(schedule, stages, 2.4) == float("inf")


def test_a_share_is_said_in_whole_bytes_and_what_is_asked_for_works():
    schedule, stages = one_f_one_b(4, 8), [Stage((Block(saved_bytes=7_523_913.3, boundary_bytes=1_500_001.0),) * 3)] * 4
    with pytest.raises(BudgetInfeasible, match=r"received: 11737304 bytes for rank 0;") as caught:
        plan_pipeline(schedule, stages, "13%")
    (needed,) = re.findall(r"budget=(\S+) or more", str(caught.value))
    assert f"rank 0 needs {needed} bytes" in str(caught.value)
    assert max(plan_pipeline(schedule, stages, int(needed)).peak_bytes) <= int(needed)


def test_each_rank_has_its_own():
    schedule, stages = one_f_one_b(4, 8), gpt(8, 8, 8, 7)
    plan = plan_pipeline(schedule, stages, [30.0, 10.0, 8.0, 9.0])
    assert all(peak <= budget for peak, budget in zip(plan.peak_bytes, (30.0, 10.0, 8.0, 9.0)))
    with pytest.raises(BudgetInfeasible, match="for rank 2") as caught:
        plan_pipeline(schedule, stages, [30.0, 10.0, 1.0, 9.0])
    assert caught.value.rank == 2
