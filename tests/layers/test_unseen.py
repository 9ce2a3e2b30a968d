"""What nobody tells a plan: that a step goes on without its first and its last call, and that modules are others."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import torchckpt
from tests.layers.models import Wide, gradients, plain_gradients
from tests.slow import few, slow_but
from torchckpt.testing import count_recomputes


class Encoder(nn.Module):
    """Returns what its last layer but one does, or leaves out the last one; its graph may be cut behind a layer."""

    def __init__(self, leaves=False, cuts=None):
        super().__init__()
        self.layers = nn.ModuleList(Wide(16, 64) for _ in range(8))
        self.leaves, self.cuts = leaves, cuts

    def forward(self, x):
        hidden = []
        for place, layer in enumerate(self.layers[: 7 if self.leaves else 8]):
            x = layer(x)
            x = x.detach() if place == self.cuts else x
            hidden.append(x)
        return hidden[-1 if self.leaves else -2]


def replays(model, *inputs):
    with count_recomputes() as counted:
        gradients(model, *inputs)
    return counted.total


@few(1)
@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize(
    ("frozen", "cuts"), slow_but([(0, None), (1, 4)], [(0, None), (1, None), (3, None), (0, 2), (1, 4)])
)
def test_a_step_goes_on_though_its_first_call_is_frozen_and_its_last_output_dropped(leaves, frozen, cuts):
    model, inputs = Encoder(leaves, cuts), [torch.randn(8, 32, 16) for _ in range(3)]
    model.layers[:frozen].requires_grad_(False)
    with torchckpt.checkpoint_layers(model, "layers.*", budget="30%") as handle:
        every = replays(model, *inputs)
        counts = {[replays(model, *inputs) for _ in range(at)][-1] for at in (2, 1, 1, 1)}  # one step to find out
        assert handle.plan.measured_peak_bytes <= handle.plan.budget_bytes
        assert len(handle.plan.took.calls) == 3 * (7 if leaves else 8)
    assert len(counts) == 1
    assert 0 < counts.pop() < every


def wider(model):
    for layer in model:
        layer.parts = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 16))


def of_another_kind(model):
    model[0].parts[1] = nn.SiLU()


def added(model):
    model[0].adapter = nn.Linear(16, 16)


def with_another_parameter(model):
    model[0].scale = nn.Parameter(torch.ones(16))


@few(2)
@pytest.mark.parametrize("change", [wider, of_another_kind, added, with_another_parameter])
def test_a_step_with_other_modules_is_counted_anew(change):
    model, x = nn.Sequential(*(Wide(16, 64) for _ in range(8))), torch.randn(8, 32, 16)
    with torchckpt.checkpoint_layers(model, "*", budget="1GiB"):
        assert [replays(model, x) for _ in range(3)] == [8, 0, 0]
        change(model)
        assert [replays(model, x) for _ in range(3)] == [8, 0, 0]


@few(1)
@pytest.mark.accelerator
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_there_count_once_of_the_whole_device(accelerator, set_to_none):
    model = nn.Sequential(*(Wide(16, 512) for _ in range(6))).to(accelerator)
    parts = [torch.randn(64, 16, device=accelerator) for _ in range(2)]

    def peak():
        torch.accelerator.reset_peak_memory_stats()
        for _ in range(2):
            for part in parts:
                model(part).square().mean().backward()
            model.zero_grad(set_to_none=set_to_none)
        torch.accelerator.synchronize()
        return torch.accelerator.max_memory_allocated()

    with torchckpt.checkpoint_layers(model, "*"):
        least = [peak() for _ in range(2)][-1]
    model.zero_grad()
    with torchckpt.checkpoint_layers(model, "*", device_memory=least + 2**16) as handle:
        for _ in range(3):
            peak()
        assert handle.plan is not None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it, without regions, too
def test_a_backward_that_compiled_autograd_compiles_tells_nothing(x, fresh_dynamo):
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    model = nn.Sequential(Wide(16, 8))
    expected = plain_gradients(model, x)
    handle = torchckpt.checkpoint_layers(model, "*", budget="100%")
    for _ in range(2):
        with compiled_autograd._enable(torch.compile(backend="eager")):
            found = gradients(model, x)
        assert all(map(torch.equal, found, expected))
        assert handle.plan is None
    for _ in range(2):
        assert all(map(torch.equal, gradients(model, x), expected))
    assert handle.plan.kept
    handle.remove()


@pytest.mark.filterwarnings("error")
def test_weights_of_a_functional_call_are_not_asked_for_gradients():
    model, x = nn.Sequential(*(Wide(16, 64) for _ in range(4))), torch.randn(8, 16)
    with torchckpt.checkpoint_layers(model, "*", budget="100%"):
        for _ in range(3):
            doubled = {name: parameter * 2 for name, parameter in model.named_parameters()}
            torch.func.functional_call(model, doubled, (x,)).sum().backward()
