"""Random numbers that a trace would freeze, or draw otherwise than the model does."""
from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.graph.eager import compare
from tests.graph.traced import Function
from tests.helpers import leaf
from tests.slow import few
from torchckpt import graph
from torchckpt.errors import CaptureError


def drop(x):
    return torch.dropout(x, 0.5, True)


def seeded(x):
    torch.manual_seed(3)
    return drop(x)


def seeded_at_last(x):
    y = drop(x)
    torch.manual_seed(3)
    return y


def forked(x):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return x + torch.randn(4)


def one_mask_twice(x):
    state = torch.get_rng_state()
    y = drop(x)
    torch.set_rng_state(state)
    return y + drop(x)


def drawn_and_put_back(x):
    with torch.random.fork_rng():
        y = drop(x)
    return y + drop(x)


def seeded_by_python(x):
    random.seed(3)
    return drop(x)


TORCH = (seeded, seeded_at_last, forked, one_mask_twice, drawn_and_put_back)
PYTHON = {
    "Python's random": [lambda x: x * random.random(), lambda x: x if random.randint(0, 9) < 99 else -x,
                        lambda x: x[:, random.sample(range(4), 4)], seeded_by_python],
    "numpy.random": [lambda x: x * numpy.random.rand(), lambda x: x * float(numpy.random.uniform() < 0.5)],
}


@few(2)
@pytest.mark.parametrize("function", TORCH, ids=lambda function: function.__name__)
@pytest.mark.parametrize("seed", [3, 5])
def test_generator_that_a_forward_sets_is_refused(function, seed):
    """Also where the state, or the seed, is afterwards as it was before."""
    x, inside = torch.randn(2, 4), leaf(2, 4)
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    for trace in (lambda: graph.rematerialize(Function(function), inside),
                  lambda: graph.gradient(lambda x: function(x).sum(), x)):
        with pytest.raises(CaptureError, match="a forward that seeds torch's generator, or sets its state"):
            trace()
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("name", "function"), [(name, call) for name, calls in PYTHON.items() for call in calls])
def test_numbers_of_python_are_refused(name, function):
    """They would be the same in all calls."""
    for trace in (lambda: graph.rematerialize(Function(function), leaf(2, 4)),
                  lambda: graph.gradient(lambda x: function(x).sum(), torch.randn(2, 4))):
        random.seed(7)
        with pytest.raises(CaptureError, match=f"received: a forward that draws numbers of {name}"):
            trace()


def test_a_replay_inside_of_a_gradient_would_draw_another_mask():
    linear = nn.Linear(4, 4)

    def loss(x):
        return checkpoint(lambda y: drop(linear(y)).sin(), x, use_reentrant=False).sum()

    with pytest.raises(CaptureError, match="a forward that seeds torch's generator"):
        graph.gradient(loss, torch.randn(2, 4))


def test_states_that_are_read_and_put_back_are_fine():
    class Net(nn.Linear):
        def forward(self, x):
            with torch.random.fork_rng():
                state = torch.get_rng_state()
                y = super().forward(x).sin()
                torch.set_rng_state(state)
            return drop(drop(y) + torch.rand(4))

    net = Net(4, 4)
    x = torch.randn(2, 4)
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    step = graph.rematerialize(net, x)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    compare(net, step, x)
