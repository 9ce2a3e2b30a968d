"""The backward where some gradients of outputs do not arrive: as in eager, and in no more bytes than planned."""
from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import nn

from tests.graph.eager import measured_peak
from tests.graph.traced import Function
from tests.helpers import assert_equal, leaf
from tests.slow import few, slow, slow_but
from torchckpt import graph
from torchckpt.graph.step.halves import Halves

pytestmark = pytest.mark.usefixtures("quick_planner")
A_LOSS_BYTES = 64
"""Of the caller's: a few scalars."""


def gradients(outputs, used, wanted):
    loss = sum((place + 1) * outputs[place].sin().sum() for place in used)
    return torch.autograd.grad(loss, wanted, allow_unused=True)


def assert_like_eager(function, *inputs, **options):
    """For every choice of outputs that a loss reads."""
    model = function if isinstance(function, nn.Module) else Function(function)
    wanted = [*model.parameters(), *inputs]
    step = graph.rematerialize(model, *inputs, **options)
    count = len(model(*inputs))
    for used in [places for size in range(1, count + 1) for places in combinations(range(count), size)]:
        torch.manual_seed(1)
        expected = gradients(model(*inputs), used, wanted)
        torch.manual_seed(1)
        assert_equal(gradients(step(*inputs), used, wanted), expected)


class Heads(nn.Module):
    def __init__(self, *heads):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 8))
        self.heads = heads

    def forward(self, x):
        h = self.body(x)
        return tuple(head(h) for head in self.heads)


HEADS = {
    "infinite derivatives": (lambda h: h.relu().sqrt(), torch.sin, lambda h: h.relu().pow(0.25)),
    "views": (lambda h: h[:2], lambda h: h.expand(3, *h.shape).transpose(0, 1)),
    "parts of one operation": (lambda h: h.split(2), lambda h: h.chunk(2, 1), lambda h: h.unbind(0)),
    "reductions": (torch.sum, lambda h: h.amax(1), lambda h: h.std(), lambda h: h.softmax(-1)),
}


OPTIONS: list[dict[str, str]] = [{}, {"keep": "speed"}, {"rng": "replay", "keep": "speed"}]
CASES = [(name, options) for name in HEADS for options in OPTIONS]
QUICK = [case for case in CASES if not case[1] or case == CASES[1]]


@few(1)
@pytest.mark.parametrize(("name", "options"), slow_but(QUICK, CASES), ids=str)
def test_every_choice_of_outputs(name, options):
    def flat(head):
        return lambda h: torch.cat([part.reshape(-1) for part in torch.utils._pytree.tree_leaves(head(h))])

    assert_like_eager(Heads(*map(flat, HEADS[name])), leaf(4, 8), **options)
    if name != "parts of one operation":
        assert_like_eager(Heads(*HEADS[name]), leaf(4, 8), **options)


def test_outputs_of_one_operation():
    """What only some of are read has zeros in eager, too."""
    assert_like_eager(lambda x: x.tanh().split([1, 2, 3]), leaf(6, 2))
    assert_like_eager(lambda x: x.tanh().unbind(0), leaf(3, 2))
    assert_like_eager(lambda x: torch.max(x.sin(), 1)[:1] + torch.var_mean(x.cos(), 1), leaf(3, 3))


@few(2)
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), *slow([(0, 1), (1, 2), (0, 1, 2)])], ids=str)
def test_svd_has_another_formula_for_missing_gradients(used):
    """It divides before it multiplies, so the last bit may differ from that with zeros."""
    model, x = Function(lambda x: torch.linalg.svd(x.tanh(), full_matrices=False)), leaf(3, 3)
    step = graph.rematerialize(model, x)
    (received,), (expected,) = gradients(step(x), used, [x]), gradients(model(x), used, [x])
    assert torch.allclose(received, expected, atol=1e-6)
    assert len(used) < 3 or torch.equal(received, expected)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.RNN])
def test_recurrent_layers(layer):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer(4, 4)

        def forward(self, x):
            output, last = self.layer(x)
            return (output, *last) if isinstance(last, tuple) else (output, last)

    assert_like_eager(Model(), leaf(3, 2, 4))


def test_nothing_not_finite_comes_of_an_output_that_nobody_reads():
    step = graph.rematerialize(Function(lambda x: (x.sqrt().sum(), x.sin().sum())))
    x = torch.zeros(3, requires_grad=True)
    step(x)[1].backward()
    assert torch.equal(x.grad, torch.ones(3))


def test_the_part_that_is_left_out_is_not_run():
    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.erfinv()

    x = leaf(3)
    step = graph.rematerialize(Function(lambda x: (Counted.apply(x).sum(), x.sin().sum())))
    outputs = step(x)
    with torch.autograd.profiler.profile() as profile:
        outputs[1].backward()
    assert not [event for event in profile.function_events if "erfinv" in event.name]


@few(1)
@pytest.mark.parametrize("used", [(0,), (2,), (0, 2), *slow([(1,), (0, 1, 2)])])
@pytest.mark.parametrize("share", [None, pytest.param("70%", marks=pytest.mark.slow), "50%"])
def test_no_more_bytes_than_planned(used, share):
    torch.manual_seed(0)
    body = [part for _ in range(6) for part in (nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1))]
    model = Heads(torch.sin, lambda h: h.relu().sqrt(), lambda h: h.cumsum(0))
    model.body = nn.Sequential(nn.Linear(8, 32), *body, nn.Linear(32, 8))
    x = torch.randn(64, 8)
    options = {} if share is None else {"budget": share}
    step = graph.rematerialize(model, x, **options)
    wanted = list(model.parameters())
    torch.manual_seed(1)
    expected = gradients(model(x), used, wanted)
    torch.manual_seed(1)
    assert_equal(gradients(step(x), used, wanted), expected)

    def run():
        outputs = step(x)
        torch.autograd.grad(sum(outputs[place].sum() for place in used), wanted, allow_unused=True)

    assert measured_peak(run) <= step.plan.peak_bytes + A_LOSS_BYTES


def test_one_is_emitted_for_each_choice_and_no_more(monkeypatch):
    emitted, before = [], Halves._emit
    monkeypatch.setattr(Halves, "_emit", lambda self, key: emitted.append(len(key)) or before(self, key))
    model = Heads(torch.sin, torch.cos, torch.tanh)
    step, x = graph.rematerialize(model), leaf(4, 8)
    for used in [(0,), (0, 1), (0, 1, 2), (0,), (0, 1)]:
        gradients(step(x), used, [x])
    assert emitted == [2, 1]
