"""A device that is out of memory in planned steps, again and again: what the errors ask for works."""
from __future__ import annotations

import re
import warnings
from dataclasses import replace

import pytest
import torch

import torchckpt
from torchckpt.layers.known import KnownStep, measured

X = torch.randn(8, 32, 16)


def step(model, x):
    model(x).square().mean().backward()
    model.zero_grad()


def out_of_memory(model, x):
    """The text of the error of a step without memory."""
    def fail(*_):
        raise torch.OutOfMemoryError("none left")

    with model.layers[3].parts.register_forward_hook(fail), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "checkpoint_layers: the device was out of memory")
        with pytest.raises(torch.OutOfMemoryError) as raised:
            step(model, x)
    return str(raised.value)


@pytest.mark.parametrize("sizes", [(8,), (8, 4), (4, 8)])
def test_each_budget_that_it_asks_for_works_and_at_last_it_asks_for_none(model, sizes):
    """The last step is without memory, the others need as much as they need."""
    def steps():
        for size in sizes:
            step(model, X[:size])

    texts, budgets = [], []
    with torchckpt.checkpoint_layers(model, "layers.*", budget="70%") as handle:
        steps()
        steps()
        while not texts or "budget=" in texts[-1]:
            steps()
            budgets.append(handle.plan.budget_bytes)
            texts.append(out_of_memory(model, X[:sizes[-1]]))
            assert len(texts) < 20
        steps()
        assert handle.plan.budget_bytes >= handle.plan.everything_recomputed_bytes
    assert budgets == sorted(budgets, reverse=True)
    assert texts[0].count("budget=") == 1 < len(texts)
    assert texts[-1].endswith("works:    smaller batches, or more layers")
    for budget in {number for text in texts for number in re.findall(r"(?:budget=|at least )(\d+)", text)}:
        with torchckpt.checkpoint_layers(model, "layers.*", budget=int(budget)):
            steps()
            steps()


def test_a_plan_with_the_least_budget_is_not_made_again(model):
    """Though it keeps calls, and a step of it took more."""
    with torchckpt.checkpoint_layers(model, "layers.*", budget="70%") as handle:
        step(model, X)
        step(model, X)
        plan = handle.plan
    known = KnownStep(key=(), tooks={(): plan.took})
    for budget, share in ((known.least_bytes + 1, 0.5), (known.least_bytes, 1.0)):
        known.share = 1.0
        known.follow(replace(plan, budget_bytes=budget))
        measured(known, 2 * budget)
        assert (known.plan is None, known.share) == (share < 1, share)
