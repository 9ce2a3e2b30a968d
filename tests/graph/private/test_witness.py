"""What a forward leaves of its trace anywhere: an error, for it has no data."""
from __future__ import annotations

import copy
import functools
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.graph.eager import compare
from tests.helpers import assert_equal
from torchckpt import graph
from torchckpt.errors import CaptureError

HERE = SimpleNamespace()
"""What outlives a call. It is new in each test: of frozen objects the garbage collector does not say what they hold."""


@pytest.fixture(autouse=True)
def new():
    HERE.list, HERE.deep, HERE.thread = [], {"in": {}}, threading.local()
    HERE.table = functools.lru_cache(lambda size: torch.arange(float(size)))
    yield
    vars(HERE).clear()


class Node:
    pass


class Leaving(nn.Module):
    def __init__(self, leave):
        super().__init__()
        self.layer, self.leave = nn.Linear(4, 4), leave
        self.far = Node()
        self.far.away = Node()

    def forward(self, x):
        h = self.layer(x)
        self.leave(self, x, h)
        return h.tanh()


def leaving(place):
    """A model of a class of its own."""
    return type("Leaving", (Leaving,), {"seen": None})(PLACES[place])


PLACES = {
    "a global list": lambda model, x, h: HERE.list.append(h),
    "detached": lambda model, x, h: HERE.list.append(h.detach()),
    "a dict in a dict": lambda model, x, h: HERE.deep["in"].update(h=h),
    "an object two levels deep": lambda model, x, h: setattr(model.far.away, "h", h),
    "the class": lambda model, x, h: setattr(type(model), "seen", h),
    "a thread's own": lambda model, x, h: setattr(HERE.thread, "h", h),
    "a cache": lambda model, x, h: HERE.table(4),
    "a tuple in a list": lambda model, x, h: HERE.list.append((1, h)),
    "an input": lambda model, x, h: HERE.list.append(x),
    "a parameter": lambda model, x, h: HERE.list.append(model.layer.weight),
    "a cycle in a list": lambda model, x, h: HERE.list.append([HERE.list, h]),
}


@pytest.mark.parametrize("place", PLACES)
def test_tensor_that_is_left_is_an_error(place):
    with pytest.raises(CaptureError, match=r"leaves a tensor somewhere[\s\S]*that outlives the call"):
        graph.rematerialize(leaving(place), torch.ones(2, 4))


@pytest.mark.parametrize("place", sorted({*PLACES} - {"a parameter"}))
def test_so_it_is_where_gradients_are_asked_for(place):
    """A parameter that a function closes over is the parameter itself."""
    model = leaving(place)
    with pytest.raises(CaptureError, match=r"leaves a tensor somewhere[\s\S]*that outlives the call"):
        graph.gradient(lambda x: model(x).sum(), torch.ones(2, 4))


def test_it_says_what_was_left_and_where():
    with pytest.raises(CaptureError, match=r"aten.addmm.default, of shape \(2, 4\), in a list that outlives the call"):
        graph.rematerialize(leaving("a global list"), torch.ones(2, 4))


def test_what_dies_with_the_call_is_no_error():
    def leave(model, x, h):
        here = [h]
        here.append(here)
        model.far.away.shape = h.shape

    model = Leaving(leave)
    compare(model, graph.rematerialize(model), torch.ones(2, 4))


def test_hook_that_keeps_activations():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_forward_hook(lambda module, inputs, output: HERE.list.append(output))
    with pytest.raises(CaptureError, match="leaves a tensor somewhere"):
        graph.rematerialize(model, torch.ones(2, 4))


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_have_their_weights_after_gradient(layer):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer(4, 4)

        def forward(self, x):
            return self.layer(x)[0].sum()

    model, x = Loss(), torch.randn(3, 2, 4)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    loss, gradients = graph.gradient(model, x, require_grads=[name for name, _ in model.named_parameters()])(x)
    assert_equal(gradients, expected)
    assert torch.equal(model(x), loss)


class Limited(nn.Linear):
    """Its weight is limited at each call, past autograd."""

    def __init__(self, limit):
        super().__init__(4, 4)
        self.limit = limit

    def forward(self, x):
        self.limit(self.weight)
        return super().forward(x).sin().sum()


def test_other_data_in_a_weight_is_refused_and_new_values_are_not():
    def limit(weight):
        weight.data = torch.renorm(weight.data, 2, 0, 0.1)

    for call in (graph.rematerialize, graph.gradient):
        with pytest.raises(CaptureError, match="gives a parameter or a buffer other data"):
            call(Limited(limit), torch.ones(2, 4))
    model = Limited(lambda weight: weight.data.copy_(torch.renorm(weight.data, 2, 0, 0.1)))
    twin = copy.deepcopy(model)
    results = [call(torch.ones(2, 4)) for call in (twin, graph.rematerialize(model))]
    assert_equal((results[1], model.weight), (results[0], twin.weight))


def test_backward_in_a_forward_is_refused():
    model = Limited(lambda weight: weight.square().sum().backward())
    with pytest.raises(CaptureError, match="the call runs a backward"):
        graph.rematerialize(model, torch.ones(2, 4))
