"""Settings of a model that its steps depend on: what is noticed, and that a model can be changed meanwhile."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from torchckpt import Pipe, checkpoint_layers
from torchckpt.measuring.remembered import ModelSettings

X = torch.randn(4, 8)


@pytest.fixture
def swaps():
    """Conversions swap parameters, as those of DTensors always do."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def of_layers(model):
    handle = checkpoint_layers(model, "*", budget="1GB")
    return handle, lambda: model(X.to(model[0][0].weight.dtype)).sum().backward()


def of_pipe(model):
    pipe = Pipe(model, [2, 1], ["cpu", "cpu"], 2, budget="100%")
    return pipe, lambda: pipe(X.to(model[0][0].weight.dtype)).sum().backward()


@pytest.mark.usefixtures("swaps")
@pytest.mark.parametrize("with_budget", [of_layers, of_pipe])
def test_parameters_can_be_swapped(with_budget):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    handle, step = with_budget(model)
    for _ in range(3):
        step()
        model.zero_grad()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    model.double()
    for _ in range(2):
        step()
    assert all(parameter.grad.dtype == torch.float64 for parameter in model.parameters())
    assert handle.plan is not None  # it was alive meanwhile


def test_a_parameter_of_another_size_is_noticed_wherever_it_lies():
    model = nn.Linear(8, 8)
    settings = ModelSettings(model)
    for size in range(9, 60):
        before = settings.now("cpu")
        del model.bias  # so that the next one may be where it was
        model.bias = nn.Parameter(torch.zeros(size))
        assert settings.now("cpu") != before


def test_what_is_trained_is_noticed():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8))
    settings = ModelSettings(model)
    before = settings.now("cpu")
    model[1].bias.requires_grad_(False)
    assert settings.now("cpu") != before
    model[1].bias.requires_grad_(True)
    assert settings.now("cpu") == before
