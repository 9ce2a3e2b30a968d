"""On a device that counts what is allocated: its own peak, the memory of the whole device, and none left."""
from __future__ import annotations

import gc
import random

import pytest
import torch

import torchckpt
from tests.layers.models import Model, Wide, random_model

pytestmark = pytest.mark.accelerator


def step(model, x):
    """The bytes that a step takes above those before it, and its gradients."""
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    torch.manual_seed(1)
    loss = model(x).square().mean()
    loss.backward()
    torch.accelerator.synchronize()
    taken = torch.accelerator.max_memory_allocated() - before
    del loss
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return taken, found


@pytest.mark.parametrize("seeds", [
    pytest.param(range(24), id="24"),
    *(pytest.param(range(at, at + 122), id=f"from {at}", marks=pytest.mark.slow) for at in range(24, 1000, 122)),
])
def test_no_step_takes_more_than_its_budget(accelerator, seeds):
    """By the device's own peak. The slow ones make it a thousand models and budgets."""
    planned = 0
    for seed in seeds:
        chosen = random.Random(seed)
        torch.manual_seed(seed)
        model = random_model(seed).to(accelerator)
        x = torch.randn(chosen.choice((2, 8)), chosen.choice((16, 64)), 16).to(accelerator)
        most, expected = step(model, x)
        budget = int(most * chosen.uniform(0.4, 1.0))
        with torchckpt.checkpoint_layers(model, "layers.*", budget=budget) as handle:
            try:
                for _ in range(3):
                    step(model, x)  # the first and the third are counted, for which the device's peak is reset
                for _ in range(2):
                    taken, found = step(model, x)
                    assert taken <= budget
                    assert taken == pytest.approx(handle.plan.peak_bytes, rel=0.02)
                    assert all(map(torch.equal, found, expected))
                planned += len(handle.plan.kept) > 0
            except torchckpt.BudgetInfeasible:
                continue
    assert planned > len(seeds) // 3


def test_a_model_that_moves_to_another_device_after_the_plan(accelerator):
    model = Model([Wide(16, 64) for _ in range(4)]).to(accelerator)
    x = torch.randn(8, 64, 16)
    with torchckpt.checkpoint_layers(model, "layers.*", budget="75%") as handle:
        for device in (accelerator, torch.device("cpu"), accelerator):
            model.to(device)
            for _ in range(3):
                step(model, x.to(device))
            assert handle.plan.peak_bytes <= handle.plan.budget_bytes
            assert 0 < len(handle.plan.kept) < 4


@pytest.fixture
def model(accelerator):
    gc.collect()
    return Model([Wide(16, 64) for _ in range(6)]).to(accelerator)


@pytest.mark.parametrize("others", [0, 100], ids=lambda others: f"others have {others} steps")
def test_the_memory_of_the_whole_device(model, accelerator, others):
    x = torch.randn(8, 64, 16).to(accelerator)
    most = [step(model, x)[0] for _ in range(2)][-1]
    held = torch.empty(others * most, dtype=torch.uint8, device=accelerator)
    there = torch.accelerator.memory_allocated()
    with torchckpt.checkpoint_layers(model, "layers.*", device_memory=there + int(0.7 * most)) as handle:
        for _ in range(3):
            step(model, x)
        assert handle.plan.budget_bytes == pytest.approx(0.7 * most, rel=0.01)
        before = len(handle.plan.kept)
        state = torch.empty(int(0.2 * most), dtype=torch.uint8, device=accelerator)  # an optimizer's
        step(model, x)
        assert len(handle.plan.kept) < before
        assert handle.plan.budget_bytes == pytest.approx(0.5 * most, rel=0.01)
        del state, held


class Failing(Wide):
    fails = False

    def forward(self, x):
        if self.fails and torchckpt.is_recomputing() == (self.fails == "replay"):
            raise torch.OutOfMemoryError("none left")
        return super().forward(x)


@pytest.mark.parametrize("where", ["forward", "replay"])
def test_out_of_memory_in_a_planned_step(accelerator, where):
    model, x = Model([Failing(16, 64) for _ in range(6)]).to(accelerator), torch.randn(8, 64, 16).to(accelerator)
    with torchckpt.checkpoint_layers(model, "layers.*", budget="70%") as handle:
        for _ in range(3):
            step(model, x)
        before = handle.plan
        for layer in model.layers:
            layer.fails = where
        said = r"none left\ncheckpoint_layers: a planned step takes more than the device has left\n  works: +budget=\d+"
        with pytest.warns(UserWarning, match="the next plan takes 90% of its budget"):
            with pytest.raises(torch.OutOfMemoryError, match=said):
                step(model, x)
        for layer in model.layers:
            layer.fails = False
        model.zero_grad()
        step(model, x)
        assert handle.plan.budget_bytes == pytest.approx(0.9 * before.budget_bytes)
        assert handle.plan.peak_bytes <= before.peak_bytes


def test_out_of_memory_in_a_step_that_recomputes_everything(accelerator):
    model, x = Model([Failing(16, 64)] * 2).to(accelerator), torch.randn(8, 64, 16).to(accelerator)
    model.layers[0].fails = "forward"
    with torchckpt.checkpoint_layers(model, "layers.*", budget="70%"):
        with pytest.raises(torch.OutOfMemoryError, match="the step recomputes every chosen layer"):
            step(model, x)
