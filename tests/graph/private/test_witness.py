"""What a forward leaves of its trace anywhere: an error, for it has no data."""
from __future__ import annotations

import copy
import functools
import gc
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.graph.eager import compare
from tests.helpers import assert_equal
from tests.slow import few
from torchckpt import graph
from torchckpt.errors import CaptureError
from torchckpt.graph.private.witness import Witness

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


@few(1)
@pytest.mark.parametrize("place", PLACES)
def test_tensor_that_is_left_is_an_error(place):
    with pytest.raises(CaptureError, match=r"leaves a tensor somewhere[\s\S]*that outlives the call"):
        graph.rematerialize(leaving(place), torch.ones(2, 4))


@few(3)
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


@few(1)
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
        with pytest.raises(CaptureError, match="gives a tensor other data"):
            call(Limited(limit), torch.ones(2, 4))
    model = Limited(lambda weight: weight.data.copy_(torch.renorm(weight.data, 2, 0, 0.1)))
    twin = copy.deepcopy(model)
    results = [call(torch.ones(2, 4)) for call in (twin, graph.rematerialize(model))]
    assert_equal((results[1], model.weight), (results[0], twin.weight))


def test_backward_in_a_forward_is_refused():
    model = Limited(lambda weight: weight.square().sum().backward())
    with pytest.raises(CaptureError, match="the call runs a backward"):
        graph.rematerialize(model, torch.ones(2, 4))


class Doing(nn.Linear):
    """Its forward does one more thing."""

    def __init__(self, does):
        super().__init__(4, 4)
        self.does, self.calls = does, 0

    def forward(self, x):
        return self.does(self, x, super().forward(x).sin()).sum()


def other_data(model, x, y):
    y.data = y.data.clamp(-0.1, 0.1)
    return y


def other_data_in_a_weight(model, x, y):
    torch.nn.utils.vector_to_parameters(2 * torch.nn.utils.parameters_to_vector([model.weight]), [model.weight])
    return y


def asks_for_a_gradient(model, x, y):
    return y if model.weight.grad is None else 2 * y


def forgets_a_gradient(model, x, y):
    model.weight.grad = None
    return y


REFUSED = {
    other_data: "gives a tensor other data",
    other_data_in_a_weight: "gives a tensor other data",
    lambda model, x, y: y if y.is_set_to(y.view(2, 4)) else 2 * y: "asks whether two tensors are one",
    asks_for_a_gradient: "the gradient of an input or a weight",
    forgets_a_gradient: "the gradient of an input or a weight",
}


@pytest.mark.parametrize("does", REFUSED)
def test_what_a_trace_does_not_see_is_refused(does):
    for call in (graph.rematerialize, graph.gradient):
        with pytest.raises(CaptureError, match=REFUSED[does]):
            call(Doing(does), torch.ones(2, 4))


def moves_itself(model, x, y):
    model.to(x.device)
    y.data.clamp_(-0.1, 0.1)
    z = y.detach().requires_grad_()
    (3 * z.sin()).sum().backward()
    y.data = y.data
    return y * z.grad * (1 if y.data.grad is None else 2)


def test_what_it_sees_is_not():
    model = Doing(moves_itself)
    compare(model, graph.rematerialize(model), torch.ones(2, 4))


def counts(model, x, y):
    model.calls += 1
    return model.calls * y


def begins_with_the_data(model, x, y):
    if not model.calls:
        with torch.no_grad():
            model.bias.copy_(y.mean(0))
    model.calls = True
    return y


@few(1)
@pytest.mark.parametrize("does", [counts, begins_with_the_data])
@pytest.mark.parametrize("rematerialize", [graph.rematerialize, graph.rematerialize_])
def test_forward_that_does_something_else_each_time_is_refused_and_has_set_nothing(does, rematerialize):
    model = Doing(does)
    with pytest.raises(CaptureError, match="sets what it reads"):
        rematerialize(model, torch.ones(2, 4))
    assert model.calls == 0
    if does is begins_with_the_data:  # the call that the error names
        model(torch.ones(2, 4))
        compare(model, graph.rematerialize(model), torch.ones(2, 4))


def test_forward_that_only_counts_is_not():
    def does(model, x, y):
        model.calls += 1
        return y

    model = Doing(does)
    compare(model, graph.rematerialize(model), torch.ones(2, 4))


def test_a_call_does_not_keep_the_operators_of_its_trace():
    before = [one for one in gc.get_objects() if type(one) is Witness]
    model = graph.rematerialize(nn.Linear(4, 4))
    model(torch.randn(2, 4))
    held = [one for one in gc.get_objects() if type(one) is Witness and one not in before]
    assert held
    assert not any(one._seen or one._runs for one in held)
