"""A device that is out of memory in planned steps: what the errors ask for works; wherever it was, the next plan takes
less."""
from __future__ import annotations

import re
import warnings
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import torchckpt
from tests.helpers import FullDevice
from tests.slow import few, rarely
from torchckpt.layers.known import KnownStep, measured
from torchckpt.regions.live import ooms_of
from torchckpt.testing import count_recomputes

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


@few(1)
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


@pytest.fixture
def device():
    device = FullDevice()
    with mock.patch("torchckpt.layers.step.ooms_of", side_effect=lambda _: device.ooms):
        yield device


PLACES = {
    "the first layer's forward": lambda model, run: model.first.register_forward_pre_hook(run),
    "a block's forward": lambda model, run: model.layers[3].parts.register_forward_pre_hook(run),
    "the head's forward": lambda model, run: model.head.register_forward_pre_hook(run),
    "the loss": lambda model, run: model.register_forward_hook(run),
    "the loss' backward": lambda model, run: model.register_forward_hook(
        lambda _, inputs, output: output.register_hook(run) and None
    ),
    "the head's backward": lambda model, run: model.head.weight.register_hook(run),
    "the last block's backward": lambda model, run: model.layers[5].parts[0].weight.register_hook(run),
    "a block's backward": lambda model, run: model.layers[3].parts[0].weight.register_hook(run),
    "the first block's backward": lambda model, run: model.layers[0].parts[0].weight.register_hook(run),
    "the first layer's backward": lambda model, run: model.first.weight.register_hook(run),
    "the optimizer": lambda model, run: mock.patch.object(model, "zero_grad", run),
}


def told(model, steps=2):
    """What is said in so many steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            step(model, X)
    return [str(each.message) for each in caught]


@few(1)
@pytest.mark.parametrize("is_held", [False, True], ids=["", "held"])
@pytest.mark.parametrize("place", rarely([*PLACES][1::2], PLACES))
def test_wherever_it_is_the_next_plan_takes_less_and_says_so_once(model, device, place, is_held):
    """Also where a notebook holds the error, and it the graph; and again in the next step that fails."""
    with torchckpt.checkpoint_layers(model, "layers.*", budget="70%") as handle:
        told(model, 3)
        before, held = handle.plan.budget_bytes, []
        for share in (0.9, 0.81):
            with warnings.catch_warnings(record=True) as caught, PLACES[place](model, device.fail):
                warnings.simplefilter("always")
                with pytest.raises(torch.OutOfMemoryError) as raised:
                    step(model, X)
            held.extend([raised] * is_held)
            del raised
            model.zero_grad()
            texts = [*(str(each.message) for each in caught), *told(model)]
            assert len(texts) == 1
            assert re.search(r"takes 90% of its budget\n  works:    budget=\d+ or less", texts[0])
            assert handle.plan.budget_bytes == pytest.approx(share * before, abs=1)
            with count_recomputes() as counted:
                assert told(model, 1) == []
            assert counted.total == 6 - len(handle.plan.kept)
        assert not any(known.is_marked for known in handle._steps._known._steps.values())


@few(1)
@pytest.mark.parametrize("place", [place for place in PLACES if place != "the optimizer"])
def test_what_torch_has_recovered_from_does_not_count(model, device, place):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="70%") as handle:
        told(model, 3)
        before = handle.plan.kept, handle.plan.budget_bytes
        with PLACES[place](model, device.recover):
            assert told(model, 1) == []
        assert told(model) == []
        assert (handle.plan.kept, handle.plan.budget_bytes) == before
    assert device.ooms > 0


def test_a_step_that_recomputes_everything_asks_once_for_smaller_batches(model, device):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="70%") as handle:
        told(model)
        least = int(handle.plan.everything_recomputed_bytes)
    with torchckpt.checkpoint_layers(model, "layers.*", budget=least) as handle:
        told(model, 3)
        texts = []
        for _ in range(3):
            with PLACES["the head's forward"](model, device.fail), pytest.raises(torch.OutOfMemoryError):
                step(model, X)
            texts += told(model)
        assert len(texts) == 1
        assert texts[0].endswith("works:    smaller batches, or more layers")


def test_memory_that_ran_out_before_a_step_does_not_count(model, device):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="70%"):
        told(model, 3)
        with torch.no_grad():
            model(X)
            device.recover()
        assert told(model) == []


@pytest.mark.parametrize("name", ["memory_stats", "memory_stats_as_nested_dict"])
def test_what_a_device_has_retried_does_not_count(name):
    allocator = SimpleNamespace(**{name: lambda device: {"num_ooms": 2, "num_alloc_retries": 3}})
    for there, ooms in ((allocator, 2), (SimpleNamespace(), 0), (None, 0)):
        with mock.patch("torchckpt.regions.live.allocator_of", return_value=there):
            assert ooms_of(torch.device("cpu")) == ooms
