"""Several known steps: which plan is followed and shown, and what a budget is for each."""
from __future__ import annotations

import re
from contextlib import suppress

import pytest
import torch

import torchckpt
from tests.layers.models import Model, Wide
from torchckpt.testing import count_recomputes, peak_bytes

X = torch.randn(8, 32, 16)


@pytest.fixture
def model():
    return Model([Wide(16, 64) for _ in range(4)])


def step(model, forwards=1, x=X):
    sum(model(x).square().mean() for _ in range(forwards)).backward()
    model.zero_grad()


def least_of(model, forwards=1):
    """What a step takes that recomputes everything."""
    with torchckpt.checkpoint_layers(model, "layers.*"):
        return peak_bytes(lambda: step(model, forwards), "cpu")


# steps that begin alike -----------------------------------------------------------------------------------------------


def test_a_step_that_exceeds_the_budget_is_no_error_for_others_that_begin_alike():
    model = Model([Wide(16, 16 * width) for width in (1, 1, 1, 4)])
    budget = least_of(model, 2) - 8
    with torchckpt.checkpoint_layers(model, "layers.*", budget=budget) as handle:
        for _ in range(3):
            step(model)
        kept = handle.plan.kept
        assert 0 < len(kept) < 4
        step(model, 2)
        step(model, 2)  # is counted
        for _ in range(3):
            with count_recomputes() as counted:
                step(model)
            assert counted.total == 4 - len(kept)
            assert handle.plan.kept == kept
        assert peak_bytes(lambda: step(model), "cpu") <= budget


def test_the_error_comes_where_the_step_is_known_and_what_it_asks_for_works(model):
    with torchckpt.checkpoint_layers(model, "layers.*", budget=least_of(model) + 8) as handle:
        for forwards in (1, 1, 2, 2):
            step(model, forwards)
        calls = []
        for _ in range(2):
            hook = model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
            with pytest.raises(torchckpt.BudgetInfeasible) as raised:
                step(model, 2)
            hook.remove()
            assert len(raised.value.plan.took.calls) == 8
            step(model)
            assert len(handle.plan.took.calls) == 4
        assert len(calls) == 4  # the first forward of each has run, and the second has begun
    with torchckpt.checkpoint_layers(model, "layers.*", budget=int(re.search(r"budget=(\d+)", str(raised.value))[1])):
        for forwards in (1, 1, 2, 2, 2, 1, 2):
            step(model, forwards)


def test_where_none_of_them_fits_the_step_is_an_error_before_it_runs(model):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1kB") as handle:
        step(model)
        with pytest.raises(torchckpt.BudgetInfeasible):
            step(model)
        assert handle.plan is None


def test_the_plan_is_that_of_the_step_that_ran(model):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="90%") as handle:
        shown = []
        for forwards in (1, 1, 1, 2, 2, 2, 1, 1, 2):
            step(model, forwards)
            with suppress(torchckpt.CheckpointError):
                shown.append(len(handle.report().took.calls))
    assert shown == [4, 4, 4, 4, 8, 4, 4, 8]  # a step that is counted follows no plan


def test_the_plan_of_a_step_that_went_on_otherwise_is_not_shown(model):
    """Of two steps that begin alike, the one that ran last."""
    with torchckpt.checkpoint_layers(model, "layers.*", budget="90%") as handle:
        for forwards in (1, 1, 2, 2, 2, 1):
            step(model, forwards)
        assert len(handle.plan.took.calls) == 4
        step(model, 3)
        assert len(handle.plan.took.calls) == 4


# a share --------------------------------------------------------------------------------------------------------------


def of_batches(model, budget, *rows):
    """The plan of each step with so many rows; None before it has one."""
    plans = []
    with torchckpt.checkpoint_layers(model, "layers.*", budget=budget) as handle:
        for size in rows:
            step(model, 1, torch.randn(size, 16))
            plans.append(handle.plan)
    return plans


def test_a_share_is_one_of_the_largest_step():
    """So the small batch that ends an epoch takes what it likes."""
    model = Model([Wide(16, 256) for _ in range(4)])
    *_, large, small = of_batches(model, "80%", *[512, 512, 512, 8] * 3)
    assert large.budget_bytes == small.budget_bytes == pytest.approx(0.8 * large.everything_kept_bytes, abs=1)
    assert small.everything_recomputed_bytes > 0.8 * small.everything_kept_bytes
    assert len(large.kept) < len(small.kept) == 4


def test_a_larger_step_makes_the_share_of_others_larger():
    model = Model([Wide(16, 64) for _ in range(4)])
    _, before, _, large, after = of_batches(model, "70%", 64, 64, 512, 512, 64)
    assert before.budget_bytes == pytest.approx(0.7 * before.everything_kept_bytes, abs=1)
    assert after.took == before.took
    assert after.budget_bytes == large.budget_bytes
    assert len(before.kept) < len(after.kept) == 4


def test_what_an_error_asks_for_is_enough_for_all_known_steps():
    model = Model([Wide(16, 256) for _ in range(4)])
    rows = 8, 512, 8
    with pytest.raises(torchckpt.BudgetInfeasible) as raised:
        of_batches(model, "10kB", *rows)
    enough = int(re.search(r"budget=(\d+)", str(raised.value))[1])
    assert enough > raised.value.least_bytes
    of_batches(model, enough, *rows * 3)
