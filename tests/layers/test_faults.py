"""Everything that is wrong with a call, and with a budget."""
from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import torchckpt
from tests.layers.models import Model, Wide, gradients
from torchckpt import ArgumentError, BudgetInfeasible, checkpoint_layers


@pytest.fixture
def model():
    return Model([Wide(16, 16) for _ in range(3)])


@pytest.mark.parametrize(("options", "said"), [
    ({"layers": None}, "neither layers nor a budget is given\n  received: checkpoint_layers(model)"),
    ({"budget": "6"}, "budget is not bytes above 0, or a size with a unit such as kB, MiB or GB, or a share of at most "
     "100% of what a step takes that keeps everything\n  received: budget='6' (it has no unit)"),
    ({"budget": "120%"}, "received: budget='120%'"),
    ({"budget": 0.5}, "received: budget=0.5 (less than a byte; a share is text)"),
    ({"budget": 10**400}, "budget is not bytes above 0"),
    ({"device_memory": "50%"}, "device_memory is not bytes above 0, or a size with a unit such as kB, MiB or GB\n"),
    ({"budget": "1GB", "device_memory": "1GB"}, "both a budget and the memory of the device are given"),
    ({"budget": "1GB", "every": 2}, "every is given with a budget, which decides what is recomputed"),
    ({"budget": "1GB", "layers": "layer.*"}, 'works:    checkpoint_layers(model, "layers.*")'),
    ({"budget": "1GB", "layers": ["layers.0", "layers.0.parts"]}, "a chosen layer is inside of another"),
])
def test_wrong_calls(model, options, said):
    with pytest.raises(ArgumentError, match=re.escape(said)) as raised:
        checkpoint_layers(model, **{"layers": "layers.*", **options})
    assert str(raised.value).startswith("checkpoint_layers: ")
    with torchckpt.testing.count_recomputes() as counted:
        gradients(model, torch.randn(2, 4, 16))
    assert counted.total == 0


def test_no_model():
    with pytest.raises(ArgumentError, match=r"the model is not an nn\.Module"):
        checkpoint_layers(3, "layers.*", budget="1GB")
    with pytest.raises(ArgumentError, match=r"the model is not an nn\.Module"):
        checkpoint_layers(3, budget="1GB")


def test_a_second_budget(model):
    with checkpoint_layers(model, "layers.0", budget="1GB"):
        with pytest.raises(ArgumentError, match="layers of the model have a budget already"):
            checkpoint_layers(model, "layers.1", budget="1GB")
        with checkpoint_layers(model, "layers.1"):
            pass
    checkpoint_layers(model, budget="1GB").remove()


def test_a_model_that_is_compiled_as_a_whole(model):
    model.compile(backend="eager")
    with pytest.raises(ArgumentError, match="the model is compiled as a whole"):
        checkpoint_layers(model, "layers.*", budget="1GB")


def test_a_lazy_layer_has_no_bytes_to_count_before_its_first_call():
    model, x = nn.Sequential(*(nn.LazyLinear(16) for _ in range(4))), torch.randn(4, 16)
    for layers in (["*"], []):
        with pytest.raises(ArgumentError, match=r"0.weight has none yet\n.*model\(\*inputs\), once, before"):
            checkpoint_layers(model, *layers, budget="60%")
    model(x)
    with checkpoint_layers(model, "*", budget="100%"):
        gradients(model, x)


def test_a_budget_below_the_least_says_so_before_the_second_step(model):
    x = torch.randn(4, 32, 16)
    with checkpoint_layers(model, "layers.*", budget="1kB"):
        gradients(model, x)
        for _ in range(2):
            with pytest.raises(BudgetInfeasible, match="checkpoint_layers: the budget is too small") as raised:
                gradients(model, x)
    least = raised.value.least_bytes
    assert raised.value.plan.kept == frozenset()
    assert f"works:    budget={least:.0f} or more" in str(raised.value)
    with checkpoint_layers(model, "layers.*", budget=least):
        for _ in range(3):
            gradients(model, x)


def test_device_memory_of_a_device_that_does_not_count(model):
    with checkpoint_layers(model, "layers.*", device_memory="1GB"):
        with pytest.raises(ArgumentError, match="device_memory is given for a device that does not count"):
            gradients(model, torch.randn(2, 4, 16))


def test_a_model_on_meta(model):
    with checkpoint_layers(model.to("meta"), "layers.*", budget="1GB") as handle:
        with pytest.warns(UserWarning, match="the step is on meta, where nothing takes bytes, so there is no plan"):
            model(torch.empty(2, 4, 16, device="meta")).square().mean().backward()
        model(torch.empty(2, 4, 16, device="meta")).square().mean().backward()
        assert handle.plan is None


def test_a_model_that_is_on_another_device_from_then_on(model):
    x = torch.randn(2, 4, 16)
    with checkpoint_layers(model, "layers.*", budget="1GB"):
        for _ in range(2):
            gradients(model, x)
        model.to(torch.float64)
        with torchckpt.testing.count_recomputes() as counted:
            gradients(model, x.double())
            gradients(model, x.double())
        assert counted.total == 3


def test_the_works_line_of_a_list(model):
    assert isinstance(model.layers, nn.ModuleList)
    with pytest.raises(ArgumentError, match="no forward that is called"):
        checkpoint_layers(model, "layers", budget="1GB")
