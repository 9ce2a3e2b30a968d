"""What rematerialize() and backend() ask for, and are refused."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.graph.traced import plan_of
from tests.helpers import leaf
from tests.models.untuned import UNTUNED
from tests.slow import few
from torchckpt import graph
from torchckpt.errors import ArgumentError, BudgetInfeasible
from torchckpt.graph.planner import GraphPlanner
from torchckpt.planning.remat.plan import Plan
from torchckpt.planning.remat.search import planner


def chain(x):
    for _ in range(9):
        x = x.tanh()
    return x.sum()


def planner_for(**options):
    defaults = {"keep": None, "budget": None, "costs": "roofline", "rng": "keep", "exact": False, "shares": {}}
    return GraphPlanner(**{**defaults, **options})


# faults ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"costs": "guess"}, 'costs is not "roofline", "profile", or seconds by operator\n  received: \'guess\'\n'
                             '  works:    costs="roofline"; costs={"aten.mm": 2e-3}'),
        ({"costs": 3}, "received: 3"),
        ({"rng": "draw"}, 'rng is neither "keep" nor "replay"\n  received: \'draw\'\n  works:    rng="keep"'),
        ({"exact": True}, "exact=True is given without a budget\n  received: budget=None\n"
                          '  works:    budget="6GiB"'),
        ({"budget": 0.5}, "the budget is not bytes above 0"),
        ({"keep": "sped"}, "keep is not one of"),
    ],
)
def test_faults(options, text):
    with pytest.raises(ArgumentError) as caught:
        planner_for(**options)
    assert text in str(caught.value)


def test_faults_beside_each_other_are_listed():
    with pytest.raises(ArgumentError, match=r"^3 faults") as caught:
        planner_for(costs="guess", rng="draw", exact=True)
    assert str(caught.value).count("received:") == 3


@pytest.mark.parametrize(
    "options",
    [{}, {"costs": "profile"}, {"costs": {"aten.mm": 1.0}}, {"costs": {}}, {"rng": "replay"},
     {"exact": True, "budget": "50%"}, {"keep": "memory", "budget": 1}],
)
def test_what_is_fine(options):
    assert planner_for(**options).replay == (options.get("rng") == "replay")


# budgets --------------------------------------------------------------------------------------------------------------


def test_share_of_the_eager_peak_has_room_for_the_loss():
    """So that all of it is enough to recompute nothing."""
    plan = plan_of(chain, leaf(1000), budget="100%")
    assert plan.recomputed == ()
    assert plan.budget_bytes == plan.eager_peak_bytes + 64


@few(1)
@pytest.mark.parametrize("less", [0, 1, 63, 64])
def test_plan_leaves_room_for_the_loss(less):
    """64 bytes, of which two scalars are used."""
    eager = plan_of(chain, leaf(1000)).peak_bytes
    plan = plan_of(chain, leaf(1000), budget=eager + 64 - less)
    assert plan.peak_bytes <= plan.budget_bytes - 64
    assert bool(plan.recomputed) == bool(less)


@pytest.mark.usefixtures("gradients_go", "quick_planner")
def test_refusal_says_what_there_is():
    with pytest.raises(BudgetInfeasible) as caught:
        plan_of(chain, leaf(1000), budget=8_000)
    least, plan = caught.value.least_bytes, caught.value.plan
    assert least - 64 == plan.peak_bytes == plan.lower_bound == 12_004
    assert str(caught.value) == (
        "rematerialize(): the budget is too small: the least found is 12.07kB\n"
        "  received: 8000, which is 8kB; no schedule needs less than 12.07kB, "
        "eager 40.08kB\n"
        "            nobody can free, at the end of the step: gradients of inputs 4kB, outputs 4B\n"
        "            nobody can free, at the peak of the least: what tanh_1 reads and writes 8kB, outputs 4B\n"
        "            beside that, at that peak, 4kB is kept for operations that follow\n"
        "            parameters, buffers and inputs, 4kB, are there before the step and count for nothing\n"
        '  works:    budget="12.07kB" or more (nothing can be below the lower bound: a smaller batch can)'
    )
    assert plan_of(chain, leaf(1000), budget=least).peak_bytes == 12_004


def every(value):
    return True


def test_refusal_above_the_lower_bound():
    with pytest.raises(BudgetInfeasible, match=r'budget="40\.08kB" or more$'):
        plan_of(chain, leaf(1000), keep=every, budget="50%")


def test_pinned_values_are_kept_within_the_budget_or_it_is_refused():
    with pytest.raises(BudgetInfeasible) as caught:
        plan_of(chain, leaf(1000), keep=every, budget="50%")
    assert caught.value.plan.recomputed == ()


@pytest.mark.slow
def test_least_bytes_that_are_named_are_held(monkeypatch):
    """A search for few bytes went below what one for those bytes found."""
    monkeypatch.setattr(planner, "_SEARCH_WORK", 1)
    model, inputs = UNTUNED["Checkpointed"]()
    for share in ("5%", "40%"):
        with pytest.raises(BudgetInfeasible) as caught:
            graph.rematerialize(model, *inputs, budget=share)
        least = caught.value.least_bytes
        assert graph.rematerialize(model, *inputs, budget=least).plan.peak_bytes <= least - 64


def test_exact_search_is_made_where_the_planner_finds_nothing(monkeypatch):
    finds_nothing = lambda flow, budget, pinned, tell: planner.solution(flow, flow.eager)  # noqa: E731
    monkeypatch.setattr("torchckpt.graph.planner.fit", finds_nothing)
    plan = plan_of(chain, leaf(1000), budget="60%", exact=True)
    assert plan.peak_bytes <= plan.budget_bytes - 64
    with pytest.raises(BudgetInfeasible, match=r"the least found is 40\.08kB"):
        plan_of(chain, leaf(1000), budget=8_000, exact=True)


# costs ----------------------------------------------------------------------------------------------------------------


class Two(nn.Module):
    """Either branch may be recomputed for the budget."""

    def forward(self, x):
        return (x.sin().exp().cos() * x.tanh().sigmoid().sin()).sum()


def test_costs_that_are_given_decide_what_is_recomputed():
    x = leaf(1000)
    dear, cheap = {"aten.tanh": 1.0, "aten.sigmoid": 1.0}, {"aten.sin": 1e-9, "aten.exp": 1e-9}
    first = plan_of(Two(), x, budget="90%", costs={**dear, **cheap})
    dear, cheap = {"aten.sin": 1.0, "aten.exp": 1.0}, {"aten.tanh": 1e-9, "aten.sigmoid": 1e-9}
    other = plan_of(Two(), x, budget="90%", costs={**dear, **cheap})
    assert not {"tanh", "sigmoid"} & {*first.recomputed}
    assert not {"sin", "exp"} & {*other.recomputed}
    assert first.recomputed
    assert other.recomputed


def test_profiled_costs_are_seconds():
    plan = plan_of(nn.Linear(64, 64), torch.randn(64, 64), costs="profile")
    assert 0 < plan.flow.seconds < 1


# plans ----------------------------------------------------------------------------------------------------------------


def test_plan_that_was_made_before_saves_the_search(monkeypatch):
    x = leaf(1000)
    plan = plan_of(chain, x, budget="50%")
    monkeypatch.setattr("torchckpt.graph.planner.fit", None)
    for keep in (plan, Plan.from_json(plan.to_json())):
        again = plan_of(chain, leaf(1000), keep=keep)
        assert again.schedule == plan.schedule
        assert again.budget_bytes is None
    with pytest.raises(BudgetInfeasible):
        plan_of(chain, x, keep=plan, budget="20%")


def test_plan_of_another_call():
    plan = plan_of(chain, leaf(1000))
    for function, x in ((chain, leaf(999)), (lambda x: chain(x) + 1, leaf(1000))):
        with pytest.raises(ArgumentError) as caught:
            plan_of(function, x, keep=plan)
        operations = len(plan.flow.operations)
        others = operations if x.numel() == 999 else operations + 1
        assert str(caught.value).startswith(
            "rematerialize(): the plan was made for another call: other operations, or other sizes\n"
            f"  received: a plan of {operations} operations for a call of {others}\n"
            '  works:    budget="6GiB" without keep=, to have a new one'
        )
