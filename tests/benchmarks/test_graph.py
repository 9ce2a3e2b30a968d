"""The benchmark of the graph level, its short version: bytes, FLOPs and bits, no seconds."""
from __future__ import annotations

import pytest

from tests.scripts import printed_by

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found():
    return printed_by("graph/short.py")


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["GPT", "ResNet", "perceptron"])
def frontier(request, found):
    return found["frontier"][request.param]


def ours(frontier):
    return {key: row for key, row in frontier["variants"].items() if key.startswith("ours")}


def test_gradients_of_ours_are_eagers_to_the_bit(frontier):
    assert {row["gradients"] for row in ours(frontier).values()} == {"equal"}


def test_a_plan_that_fits_is_measured_within_its_budget(frontier):
    over = {key for key, row in ours(frontier).items() if row["peak"] * frontier["eager bytes"] > row["budget bytes"]}
    assert over == {key for key, row in ours(frontier).items() if not row["fits"]}


def test_what_is_planned_is_what_is_measured(frontier):
    measured = {key: row["peak"] * frontier["eager bytes"] for key, row in ours(frontier).items()}
    assert {key: row["planned bytes"] for key, row in ours(frontier).items()} == pytest.approx(measured, rel=1e-3)


def test_ours_is_better_in_memory_or_compute_at_each_of_torchs_budgets(frontier):
    verdict = frontier["verdict"]
    assert verdict["better"] == verdict["budgets"]
    assert verdict["more bytes"] == []


def test_a_checkpoint_around_each_block_has_eagers_gradients_for_a_third_of_its_flops(frontier):
    by_block = frontier["variants"]["by block"]
    assert by_block["gradients"] == "equal"
    assert by_block["flops"] == pytest.approx(1 / 3, abs=0.04)


@pytest.mark.parametrize("place", [0, 1], ids=["GPT", "ResNet"])
@pytest.mark.parametrize("policy", ["speed", "memory"])
def test_a_policy_takes_no_more_memory_than_the_seeds_and_computes_at_most_half_as_much_again(found, place, policy):
    rows = found["policies"][place]["rows"]
    seeds, own = rows[f"seed's {policy}"], rows[f"ours {policy}"]
    assert all(row["bit-equal"] for row in rows.values())
    assert own["peak"] <= seeds["peak"]
    assert rows[f"ours below the bytes of seed's {policy}"]["peak"] < seeds["peak"]
    assert rows[f"ours below the bytes of seed's {policy}"]["share"] < seeds["share"] / 2


def test_deep_residual_networks_are_bit_equal_under_every_plan(found):
    rows = found["deep"]["rows"]
    assert all(row["bit-equal"] for row in rows.values())
    assert rows["keeps all"]["peak"] == pytest.approx(1, abs=1e-3)
    assert rows['keep="memory"']["peak"] < 0.6


def test_every_policy_and_budget_is_exact(found):
    told = found["exactness"]
    assert told["equal"] == told["plans"] >= 4
    assert told["worst prediction"] < 1e-3
    assert told["over budget"] == 0


def test_synthetic_steps_fit_into_the_budgets_of_the_planning_benchmark(found):
    fitting = {(row["kind"], row["share"]) for row in found["planning"] if row["fits"]}
    assert fitting >= {(kind, 0.7) for kind in ("transformer", "ResNet", "perceptron", "random")}
