"""What a forward leaves of its trace anywhere: an error, for it has no data."""
from __future__ import annotations

import functools
import gc
import threading

import pytest
import torch
from torch import nn

from tests.graph.eager import compare
from tests.helpers import assert_equal
from torchckpt import graph
from torchckpt.errors import CaptureError


@pytest.fixture(autouse=True, scope="module")
def nothing_frozen():
    """The garbage collector does not say of frozen objects what they hold."""
    gc.unfreeze()


LIST, DEEP = [], {"in": {}}
THREAD = threading.local()


class Node:
    pass


class Leaving(nn.Module):
    seen = None

    def __init__(self, leave):
        super().__init__()
        self.layer, self.leave = nn.Linear(4, 4), leave
        self.far = Node()
        self.far.away = Node()

    def forward(self, x):
        h = self.layer(x)
        self.leave(self, x, h)
        return h.tanh()


@functools.lru_cache
def table(size):
    return torch.arange(float(size))


PLACES = {
    "a global list": lambda model, x, h: LIST.append(h),
    "detached": lambda model, x, h: LIST.append(h.detach()),
    "a dict in a dict": lambda model, x, h: DEEP["in"].update(h=h),
    "an object two levels deep": lambda model, x, h: setattr(model.far.away, "h", h),
    "the class": lambda model, x, h: setattr(type(model), "seen", h),
    "a thread's own": lambda model, x, h: setattr(THREAD, "h", h),
    "a cache": lambda model, x, h: table(4),
    "a tuple in a list": lambda model, x, h: LIST.append((1, h)),
    "an input": lambda model, x, h: LIST.append(x),
    "a parameter": lambda model, x, h: LIST.append(model.layer.weight),
    "a cycle in a list": lambda model, x, h: LIST.append([LIST, h]),
}


@pytest.fixture(autouse=True)
def clean():
    yield
    LIST.clear()
    DEEP["in"].clear()
    Leaving.seen = None
    vars(THREAD).clear()
    table.cache_clear()


@pytest.mark.parametrize("place", PLACES)
def test_tensor_that_is_left_is_an_error(place):
    with pytest.raises(CaptureError, match=r"leaves no tensor anywhere else[\s\S]*that outlives the call"):
        graph.rematerialize(Leaving(PLACES[place]), torch.ones(2, 4))


@pytest.mark.parametrize("place", sorted({*PLACES} - {"a parameter"}))
def test_so_it_is_where_gradients_are_asked_for(place):
    """A parameter that a function closes over is the parameter itself."""
    model = Leaving(PLACES[place])
    with pytest.raises(CaptureError, match=r"leaves no tensor anywhere else[\s\S]*that outlives the call"):
        graph.gradient(lambda x: model(x).sum(), torch.ones(2, 4))


def test_it_says_what_was_left_and_where():
    with pytest.raises(CaptureError, match=r"aten.addmm.default, of shape \(2, 4\), in a list that outlives the call"):
        graph.rematerialize(Leaving(PLACES["a global list"]), torch.ones(2, 4))


def test_what_dies_with_the_call_is_no_error():
    def leave(model, x, h):
        here = [h]
        here.append(here)
        model.far.away.shape = h.shape

    model = Leaving(leave)
    compare(model, graph.rematerialize(model), torch.ones(2, 4))


def test_hook_that_keeps_activations():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_forward_hook(lambda module, inputs, output: LIST.append(output))
    with pytest.raises(CaptureError, match="leaves no tensor anywhere else"):
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
    loss, found = graph.gradient(model, x, require_grads=[name for name, _ in model.named_parameters()])(x)
    assert_equal(found, expected)
    assert torch.equal(model(x), loss)
