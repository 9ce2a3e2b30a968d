"""What a forward depends on, changed after the trace, and outputs whose elements share memory."""
from __future__ import annotations

import copy
import functools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from tests.slow import few, slow_but
from torchckpt import graph


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight
        self.register_buffer("first", torch.ones(4))
        self.register_buffer("second", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.first + self.second


def other_weight(model: Three) -> None:
    model.layers[2].weight = model.layers[1].weight


def shared_module(model: Three) -> None:
    model.layers[2] = model.layers[1]


def apart(model: Three) -> None:
    model.layers[2].weight = nn.Parameter(torch.ones(4, 4))


def one_buffer(model: Three) -> None:
    model.second = model.first


TIES = [(in_place, tie) for tie in (other_weight, shared_module, apart, one_buffer) for in_place in (False, True)]


@few(1)
@pytest.mark.parametrize(("in_place", "tie"), slow_but(TIES[::3], TIES))
def test_what_is_shared_otherwise_is_traced_again(tie, in_place: bool) -> None:
    torch.manual_seed(0)
    model, x = Three(), torch.randn(8, 4)
    step = graph.rematerialize(model, x)
    if in_place:
        graph.rematerialize_(model, x)
        step = model
    step(x)
    tie(model)
    plain = Three()
    plain.load_state_dict(model.state_dict())
    tie(plain)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(step(x), plain(x))


@dataclass(slots=True)
class Scaled:
    scale: float = 2.0


class Bare:
    __slots__ = "scale"

    def __init__(self) -> None:
        self.scale = 2.0


def scaled_by(x: Tensor, *, config) -> Tensor:
    return x * config.scale


class ByConfig(nn.Module):
    def __init__(self, config, is_bound: bool) -> None:
        super().__init__()
        self.layer, self.config = nn.Linear(4, 4), config
        self.scaled = functools.partial(scaled_by, config=config) if is_bound else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h * self.config.scale if self.scaled is None else self.scaled(h)


@few(1)
@pytest.mark.parametrize("is_bound", [False, True])
@pytest.mark.parametrize("kind", [Scaled, Bare])
def test_fields_in_slots_and_keywords_of_partials_are_read_again(kind, is_bound: bool) -> None:
    model, x = ByConfig(kind(), is_bound), torch.randn(8, 4)
    step = graph.rematerialize(model, x)
    step(x)
    model.config.scale = 3.0
    assert torch.equal(step(x), model(x))
    assert torch.equal(step(x), model.layer(x) * 3.0)


class Overlapping(nn.Module):
    def __init__(self, view) -> None:
        super().__init__()
        self.layer, self.view = nn.Linear(8, 8), view

    def forward(self, x: Tensor) -> Tensor:
        return self.view(self.layer(x))


@few(1)
@pytest.mark.parametrize(
    "view",
    [
        lambda h: h.unfold(1, 3, 1),
        lambda h: h.as_strided((6, 4, 4), (8, 1, 1)),
        lambda h: h[:, :1].expand(6, 5),
        lambda h: h.t(),
        lambda h: h[::2, 1:7],
    ],
)
def test_gradients_of_outputs_whose_elements_share_memory(view) -> None:
    torch.manual_seed(0)
    model, x = Overlapping(view), torch.randn(6, 8)

    def gradient(call) -> Tensor:
        model.zero_grad()
        y = call(x)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        (y * weight).sum().backward()
        return model.layer.weight.grad.clone()

    assert torch.equal(gradient(model), gradient(graph.rematerialize(model, x)))


class State(nn.Linear):
    """It replaces a buffer by a value with a history."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("state", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.state * 0.5 + super().forward(x).mean(0)
        return x * self.state


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_gradients_through_a_buffer_from_call_to_call() -> None:
    torch.manual_seed(0)
    model = State()
    twin = copy.deepcopy(model)
    results = []
    for module, call in ((twin, twin), (model, graph.rematerialize(model))):
        outputs = [call(torch.full((2, 4), value)) for value in (1.0, 2.0)]
        (outputs[1].sum() + module.state.sin().sum()).backward()
        results.append((outputs, module.state, module.weight.grad))
    torch.testing.assert_close(results[1], results[0])
    assert model.state.requires_grad


class Asking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        are_parameters = isinstance(self.weight, nn.Parameter), isinstance(x, nn.Parameter)
        return super().forward(x).sum() * (1.0 if are_parameters == (True, False) else 2.0)


def test_parameters_are_parameters_in_a_trace() -> None:
    model, x = Asking(4, 4), torch.ones(2, 4)
    loss, _ = graph.gradient(model, x)(x)
    assert torch.equal(model(x), graph.rematerialize(model)(x))
    assert torch.equal(model(x), loss)
