"""How messages write what they received, and where a name is that was looked for in another module."""
from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import torchckpt
from tests.slow import few, slow
from torchckpt import ArgumentError, BudgetInfeasible, RegionError, checkpoint_layers, checkpoint_module, graph
from torchckpt.costs import pipeline_costs
from torchckpt.distributed import recompute_ahead
from torchckpt.errors import brief, kind
from torchckpt.pipe import Pipe, balance_by_bytes, balance_by_time
from torchckpt.planning import Block, Stage, one_f_one_b
from torchckpt.planning.plan import plan_pipeline
from torchckpt.testing import assert_transparent, peak_bytes, saved_by_line

X, LAYERS = torch.ones(64, 64), nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
STAGES = [Stage((Block(),) * 8)] * 4


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (X, "a tensor of shape (64, 64)"),
        (nn.Linear, "the class Linear"),
        (nn.Sequential(nn.ReLU()), "Sequential( (0): ReLU() )"),
        ("1f1b", "'1f1b'"),
        ("a\nb", "'a\\nb'"),
        (None, "None"),
        ("a" * 200, "'" + "a" * 116 + "..."),
    ],
    ids=str,
)
def test_what_was_received_is_one_short_line(value, text):
    assert brief(value) == text


def test_the_kind_of_a_class_is_not_type():
    assert [kind(nn.Linear), kind(nn.ReLU()), kind(3)] == ["the class Linear", "ReLU", "int"]


WRONG = {
    "rematerialize": lambda: graph.rematerialize(X, LAYERS),
    "region": lambda: graph.region(X),
    "gradient": lambda: graph.gradient(X, LAYERS),
    "plan_pipeline": lambda: plan_pipeline(STAGES, one_f_one_b(4, 8), budget="50%"),
    "stages": lambda: plan_pipeline(one_f_one_b(4, 8), STAGES[0].blocks, budget="50%"),
    "partitions": lambda: balance_by_time(LAYERS, 2, X),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_no_message_pours_out_a_value(wrong):
    with pytest.raises(ArgumentError) as caught:
        wrong()
    lines = str(caught.value).splitlines()
    assert all(line.startswith(("  received: ", "  works:    ")) for line in lines if line.startswith(" "))
    assert len(lines) <= 7
    assert max(map(len, lines)) < 160


def test_a_class_is_called_one():
    with pytest.raises(ArgumentError, match="received: the class Linear"):
        checkpoint_module(nn.Linear)
    with pytest.raises(ArgumentError, match="received: the class Linear"):
        checkpoint_layers(nn.Linear, "*")
    with pytest.raises(ArgumentError, match="received: the class Schedule1F1B"):
        recompute_ahead(torch.distributed.pipelining.Schedule1F1B)


def test_a_name_of_another_module_is_shown_its_place():
    for home, name in ((home, name) for home, names in torchckpt._ELSEWHERE.items() for name in names):
        with pytest.raises(AttributeError, match=rf"has no attribute '{name}'; it is torchckpt.{home}.{name}$"):
            getattr(torchckpt, name)
        place = torchckpt
        for part in home.split("."):
            place = getattr(place, part)
        assert name in place.__all__
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        torchckpt.nothing  # noqa: B018


INFEASIBLE = {
    "a pipeline": lambda: plan_pipeline(one_f_one_b(4, 8), STAGES, "1%"),
    "a traced step": lambda: graph.rematerialize(LAYERS, torch.ones(64, 2), budget=1000),
}


@few(1)
@pytest.mark.usefixtures("quick_planner", "quick_search")
@pytest.mark.parametrize("refused", INFEASIBLE.values(), ids=INFEASIBLE)
@pytest.mark.parametrize(
    "again", [lambda error: pickle.loads(pickle.dumps(error)), *slow([copy.copy])], ids=["pickle", "copy"]
)
def test_a_budget_that_is_refused_in_another_process_says_the_same(refused, again):
    """Processes of ``multiprocessing`` send an error as a pickle."""
    with pytest.raises(BudgetInfeasible) as caught:
        refused()
    error = again(caught.value)
    assert type(error) is BudgetInfeasible
    assert str(error) == str(caught.value)
    assert str(error).startswith(error.caller)
    assert (error.least_bytes, error.rank) == (caught.value.least_bytes, caught.value.rank)
    assert error.plan == caught.value.plan is not None


class Users(nn.Linear):
    """A layer of the user that calls a function of this package, which raises an error."""

    def forward(self, x):
        one_f_one_b(0, 8)
        return x


USERS = Users(64, 64)


def users(*_):
    return USERS(X)


RUN_USERS_CODE = {
    "peak_bytes": lambda: peak_bytes(users),
    "saved_by_line": lambda: saved_by_line(users),
    "assert_transparent": lambda: assert_transparent(users, X),
    "rematerialize": lambda: graph.rematerialize(USERS, X),
    "frontier": lambda: graph.frontier(USERS, X),
    "balance_by_time": lambda: balance_by_time(2, nn.Sequential(USERS, nn.ReLU()), X),
    "balance_by_bytes": lambda: balance_by_bytes(2, nn.Sequential(USERS, nn.ReLU()), X),
    "pipeline_costs": lambda: pipeline_costs(lambda: ([USERS], X), "H100"),
    "Pipe": lambda: Pipe(nn.Sequential(USERS), [1], devices=["cpu"], chunks=1)(X),
}


@pytest.mark.parametrize("run", RUN_USERS_CODE.values(), ids=RUN_USERS_CODE)
def test_an_error_of_the_users_own_function_keeps_its_name(run):
    with pytest.raises(ArgumentError, match=r"^one_f_one_b\(\): "):
        run()


@pytest.mark.parametrize("run", [peak_bytes, saved_by_line])
def test_an_error_of_a_step_without_a_name_gets_none(run):
    def step():
        torchckpt.Checkpointing(LAYERS).recompute(X)

    with pytest.raises(RegionError, match=r"^the region has not run its forward yet"):
        run(step)


@pytest.mark.parametrize("run", [peak_bytes, saved_by_line])
def test_an_error_of_a_call_has_its_name(run):
    with pytest.raises(ArgumentError, match=rf"^{run.__name__}\(\): the step is not callable"):
        run(3)
