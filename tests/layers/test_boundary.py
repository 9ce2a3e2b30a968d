"""Inputs that a kept call does not save: they are in no plan, unless somebody else holds them."""
from __future__ import annotations

import random
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn

from tests.halves import ROWS, SIZE, Rows, wide
from tests.layers.models import Model
from tests.slow import few, slow
from torchckpt import checkpoint_layers, is_recomputing
from torchckpt.errors import BudgetInfeasible
from torchckpt.testing import peak_bytes

INPUT_BYTES = ROWS * SIZE * 2


def planned_and_measured(model, budget):
    x = torch.randn(ROWS, SIZE, dtype=torch.bfloat16)
    layers = checkpoint_layers(model.bfloat16(), "layers.*", budget=budget)

    def step():
        model(x).float().square().mean().backward()
        model.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            step()
    planned, kept = layers.plan.peak_bytes, len(layers.plan.kept)
    measured = peak_bytes(step, device="cpu")
    layers.remove()
    return planned, measured, kept


@few(1)
@pytest.mark.parametrize("budget", ["90%", "70%", "50%"])
def test_what_is_planned_is_taken_but_for_the_input_of_the_last_layer(budget):
    planned, measured, kept = planned_and_measured(Rows([2 * SIZE] * 12), budget)
    assert planned - INPUT_BYTES <= measured <= planned
    assert 0 < kept < 12


@few(1)
@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("between", [None, wide])
@pytest.mark.parametrize("seed", [*slow([0]), 1, 2])
def test_never_less_is_planned_than_taken(between, holds, seed):
    chosen = random.Random(seed)
    for budget in ("95%", "60%", "35%"):
        model = Rows([SIZE * chosen.randint(1, 6) for _ in range(chosen.randint(2, 8))], between, holds)
        try:
            planned, measured, _ = planned_and_measured(model, budget)
        except BudgetInfeasible:
            continue
        assert measured <= planned


class Bent(nn.Module):
    """Saves what it returns, and not what it is called with. Its backward takes more than its forward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, 8 * SIZE), nn.Linear(8 * SIZE, SIZE)

    def forward(self, x):
        return self.second(self.first(nn.functional.dropout(x, 0.1)).sin().pow(3)).relu()


def test_an_input_that_the_layer_before_has_saved_is_there_while_the_backward_runs():
    model = nn.Sequential(OrderedDict(layers=nn.Sequential(*(Bent() for _ in range(3)))))
    planned, measured, kept = planned_and_measured(model, "100%")
    assert planned == measured
    assert kept == 3


class Looked(nn.Module):
    """A block of which a hook takes what is inside, as transformers does with ``output_attentions=True``."""

    def __init__(self):
        super().__init__()
        self.up, self.soft, self.down, self.drop = nn.Linear(64, 64), nn.Softmax(-1), nn.Linear(64, 64), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.down(self.drop(self.soft(self.up(x))))


@pytest.mark.parametrize("budget", ["70%", "85%"])
def test_what_a_loss_reads_of_the_inside_of_a_layer(budget):
    """It holds it until its own backward, and a kept call until the call's."""
    model = Model([Looked() for _ in range(6)], 64)
    taken = []
    for layer in model.layers:
        layer.soft.register_forward_hook(lambda *of: None if is_recomputing() else taken.append(of[2]))
    handle = checkpoint_layers(model, "layers.*", budget=budget)
    x = torch.randn(256, 64)
    for _ in range(4):
        loss = model(x).square().mean()
        loss += sum(each.square().mean() for each in taken)
        taken.clear()
        loss.backward()
        del loss
        model.zero_grad()
    plan = handle.plan
    assert 0 < len(plan.kept) < 6
    assert plan.measured_peak_bytes <= plan.peak_bytes <= plan.budget_bytes
    assert plan.measured_peak_bytes >= 0.94 * plan.peak_bytes


class Tied(nn.Module):
    """A block whose weight is that of all blocks, computed."""

    def __init__(self, up):
        super().__init__()
        self.up, self.down, self.drop = up, nn.Linear(128, 64), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(nn.functional.gelu(self.up(x))))


@pytest.mark.parametrize("budget", ["70%", "85%"])
def test_one_weight_that_is_cached_around_all_layers_counts_once(budget):
    up = nn.utils.parametrizations.weight_norm(nn.Linear(64, 128))
    model, x = Model([Tied(up) for _ in range(6)], 64), torch.randn(64, 64)
    handle = checkpoint_layers(model, "layers.*", budget=budget)

    def step():
        with nn.utils.parametrize.cached():
            loss = model(x).square().mean()
        loss.backward()
        model.zero_grad()

    for _ in range(3):
        step()
    measured = peak_bytes(step, device="cpu")
    assert 1 < len(handle.plan.kept) < 6
    assert measured <= handle.plan.peak_bytes <= measured + up.weight.nbytes
