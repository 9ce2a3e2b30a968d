"""Weight gradients of a stage keep the order in which the schedule adds them up, whatever a plan makes of them."""
from __future__ import annotations

import random

import pytest

from tests.planning.plan.by_hand import actions, one_rank
from torchckpt.planning import Block, Choice, Kind, Schedule, Stage
from torchckpt.planning.plan import PipelinePlan, plan_pipeline
from torchckpt.planning.plan.run.order import done_whole, summed_as_given

GIVEN = "0F0 0F1 0F2 0I0 0B1 0W0 0I2 0W2"


def ordered(planned, given=GIVEN, m=3):
    problem = plan_pipeline(one_rank(given, m), [Stage((Block(),))], "100%").problem
    choices = {(0, i): Choice((0,)) for i in range(m)}
    plan = summed_as_given(PipelinePlan.of(problem, one_rank(planned, m), choices))
    return " ".join(map(str, plan.schedule.ranks[0]))


@pytest.mark.parametrize(
    ("planned", "found"),
    [
        (GIVEN, GIVEN),
        ("0F0 0F1 0F2 0I0 0W0 0B1 0I2 0W2", "0F0 0F1 0F2 0I0 0B1 0W0 0I2 0W2"),  # too early
        ("0F0 0F1 0F2 0B0 0B1 0B2", "0F0 0F1 0F2 0I0 0B1 0W0 0B2"),  # whole too early
        ("0F0 0F1 0F2 0I0 0B1 0B2 0W0", "0F0 0F1 0F2 0I0 0B1 0W0 0B2"),  # too late
        ("0F0 0F1 0F2 0I0 0B1 0I2 0W2 0W0", "0F0 0F1 0F2 0I0 0B1 0I2 0W0 0W2"),  # the wrong way round
        ("0F0 0F1 0F2 0R0 0I0 0B1 0I2 0W0 0W2", "0F0 0F1 0F2 0R0 0I0 0B1 0I2 0W0 0W2"),
    ],
)
def test_weight_gradients_are_put_into_their_order(planned, found):
    assert ordered(planned) == found


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("0F0 0F1 0I0 0W0 0I1 0W1", "0F0 0F1 0B0 0B1"),
        ("0F0 0F1 0I0 0I1 0W0 0W1", "0F0 0F1 0B0 0B1"),
        ("0F0 0F1 0I0 0B1 0W0", "0F0 0F1 0I0 0B1 0W0"),  # whole, it would add up the other way round
    ],
)
def test_split_backwards_are_done_whole_where_sums_stay(given, found):
    assert " ".join(map(str, done_whole(one_rank(given, 2)).ranks[0])) == found


@pytest.mark.parametrize("seed", range(30))
def test_any_order_is_mended(seed):
    """Of weight gradients that stand anywhere behind those of their inputs."""
    draw = random.Random(seed)
    m = 6
    kinds = {i: draw.choice("BI") for i in range(m)}
    given = _shuffled(draw, kinds, m)
    kinds = {i: "B" if kind == "B" or draw.random() < 0.3 else "I" for i, kind in kinds.items()}
    found = ordered(_shuffled(draw, kinds, m), given, m).split()
    assert [word[2] for word in found if word[1] in "BW"] == [word[2] for word in given.split() if word[1] in "BW"]
    assert [word[2] for word in found if word[1] in "BI"] == [str(i) for i in range(m)]
    assert all(found.index(f"0I{i}") < found.index(f"0W{i}") for i in range(m) if f"0W{i}" in found)


def _shuffled(draw, kinds, m):
    order = [f"0F{i}" for i in range(m)] + [f"0{kinds[i]}{i}" for i in range(m)]
    for i in range(m):
        if kinds[i] == "I":
            order.insert(draw.randint(order.index(f"0I{i}") + 1, len(order)), f"0W{i}")
    return " ".join(order)


@pytest.mark.parametrize("tied", [True, False])
def test_stages_that_share_parameters_add_up_one_sum(tied):
    given = "0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1"
    planned = "0F0 1F0 1I0 1W0 0F1 0I0 1F1 1I1 1W1 0W0 0I1 0W1"
    schedules = [Schedule("by hand", (actions(text),), (0, 0), 2) for text in (given, planned)]
    problem = plan_pipeline(schedules[0], [Stage((Block(),))] * 2, "100%").problem
    choices = {(stage, i): Choice((0,)) for stage in range(2) for i in range(2)}
    plan = summed_as_given(PipelinePlan.of(problem, schedules[1], choices), tied)
    sums = [str(action) for action in plan.schedule.ranks[0] if action.kind is Kind.WEIGHT_GRAD]
    assert sums == (["1W0", "0W0", "1W1", "0W1"] if tied else ["1W0", "1W1", "0W0", "0W1"])
