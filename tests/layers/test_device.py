"""On a device that counts what is allocated: its own peak, the memory of the whole device, and none left."""
from __future__ import annotations

import gc
import random

import pytest
import torch

import torchckpt
from tests.layers.models import Model, Wide, random_model
from tests.slow import few

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


def test_a_model_on_two_devices_is_told_that_the_budget_is_of_one(two_accelerators):
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8).to(device) for device in two_accelerators))
    model[0].register_forward_hook(lambda module, inputs, output: output.to(two_accelerators[1]))
    with torchckpt.checkpoint_layers(model, "*", budget="1MB"):
        with pytest.warns(UserWarning, match="on several accelerators, and the budget is of the one that a step uses"):
            model(torch.ones(4, 8, device=two_accelerators[0], requires_grad=True)).sum().backward()


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


@few(1)
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


class Collecting(Wide):
    """Collects garbage in its first forward, as Python does when it likes."""

    has_collected = False

    def forward(self, x):
        if not self.has_collected:
            self.has_collected = True
            gc.collect()
        return super().forward(x)


def old_loss(accelerator):
    """Holds the graph of a model that is gone, so its weights."""
    model = Model([Wide(16, 512) for _ in range(6)]).to(accelerator)
    loss = model(torch.randn(8, 64, 16, device=accelerator)).square().mean()
    loss.backward()
    return loss


def unused_loss(accelerator):
    """Holds the graph of a forward without a backward, so what it saves."""
    return Model([Wide(16, 512)]).to(accelerator)(torch.randn(8, 64, 16, device=accelerator)).square().mean()


def garbage(accelerator):
    circle = [torch.empty(2**20, device=accelerator)]
    circle.append(circle)


@few(1)
@pytest.mark.parametrize("frees_in", [0, 2])
@pytest.mark.parametrize("made", [old_loss, unused_loss, garbage])
def test_a_counted_step_that_frees_what_others_made(accelerator, made, frees_in):
    """The first and the third step are counted. The variable of the loop holds the old loss until the new one is there.
    """
    gc.collect()
    gc.disable()
    try:
        model = Model([Collecting(16, 64) for _ in range(6)]).to(accelerator)
        x = torch.randn(8, 64, 16, device=accelerator)
        most = [step(model, x)[0] for _ in range(2)][-1]
        loss = None
        with torchckpt.checkpoint_layers(model, "layers.*", budget=int(0.7 * most)) as handle:
            for number in range(7):
                if number == frees_in:
                    loss = made(accelerator)
                    model.layers[0].has_collected = False
                torch.accelerator.synchronize()
                before = torch.accelerator.memory_allocated()
                torch.accelerator.reset_peak_memory_stats()
                loss = model(x).square().mean()
                loss.backward()
                torch.accelerator.synchronize()
                if number not in (0, 2):  # in which the peak is reset
                    assert torch.accelerator.max_memory_allocated() - before <= 0.7 * most
                model.zero_grad()
            assert 0 < len(handle.plan.kept) < 6
            assert handle.report().measured_peak_bytes == pytest.approx(handle.plan.peak_bytes, rel=0.02)
    finally:
        gc.enable()


def counted(model, given):
    """How many steps are counted until there is a plan."""
    with torchckpt.checkpoint_layers(model, "layers.*", budget="95%") as handle:
        for number in range(6):
            model(given()).square().mean().backward()
            if handle.plan is not None:
                return number
            model.zero_grad()
    return None


def test_inputs_that_nobody_holds_are_no_loss(accelerator):
    model = Model([Wide(16, 64) for _ in range(6)]).to(accelerator)
    assert counted(model, lambda: torch.randn(64, 64, 16, device=accelerator)) == 1


def test_steps_that_free_as_much_each_time_have_a_plan(accelerator):
    """As where a generator is in front of the model: the backward frees what it had saved before."""
    model = Model([Wide(16, 64) for _ in range(6)]).to(accelerator)
    before = Wide(16, 1024).to(accelerator)
    assert counted(model, lambda: before(torch.randn(64, 64, 16, device=accelerator))) == 2


def test_gradients_that_are_views_of_buckets_from_before_are_not_made(accelerator):
    """As those of DistributedDataParallel with gradient_as_bucket_view=True."""
    model = Model([Wide(16, 64) for _ in range(6)]).to(accelerator)
    for parameter in model.parameters():
        bucket = torch.zeros(2, *parameter.shape, device=accelerator)

        def view(parameter, bucket=bucket):
            parameter.grad = bucket[0].copy_(parameter.grad)

        parameter.register_post_accumulate_grad_hook(view)
    assert counted(model, lambda: torch.randn(1, 8, 16, device=accelerator)) == 1
