"""Sums of gradients in place: eager's bits in eager's bytes, where a weight is read in several places."""
from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.graph.eager import assert_same, measured_peak, step
from tests.graph.step.test_partial import assert_like_eager
from tests.graph.traced import joint_of
from tests.helpers import leaf
from tests.slow import few, rarely, slow
from torchckpt import graph

WORDS, WIDTH = 512, 32
A_LOSS_BYTES = 8
aten = torch.ops.aten


class Tied(nn.Module):
    """A table of words, which the head reads as ``head`` says."""

    def __init__(self, head):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.mix, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), head

    def forward(self, words):
        return self.head(torch.tanh(self.mix(self.words(words))), self.words.weight)


def entropy(scores):
    return F.cross_entropy(scores.flatten(0, 1), torch.arange(32))


HEADS = {
    "a slice": lambda x, w: entropy(F.linear(x, w[:256])),
    "columns": lambda x, w: entropy(F.linear(x[..., :16], w[:, :16]) + F.linear(x[..., 16:], w[:, 16:])),
    "chunks": lambda x, w: sum(F.linear(x, part).sin().sum() for part in w.chunk(8)),
    "rows": lambda x, w: sum((x @ w[row]).sin().sum() for row in range(8)),
    "whole": lambda x, w: entropy(F.linear(x, w)),
    "transposed": lambda x, w: entropy(x @ w[:64].t()),
}


@few(1)
@pytest.mark.parametrize("head", rarely(["rows", "columns"], HEADS))
def test_tied_weights_take_what_eager_takes(head):
    model, words = Tied(HEADS[head]), torch.randint(WORDS, (8, 4))
    rematerialized = graph.rematerialize(model, words)
    assert_same(step(model, (words,), torch.sum, call=rematerialized), step(model, (words,), torch.sum))
    eager = measured_peak(lambda: model(words).backward())
    model.zero_grad()
    measured = measured_peak(lambda: rematerialized(words).backward())
    assert abs(measured - rematerialized.plan.peak_bytes) <= A_LOSS_BYTES
    assert abs(eager - rematerialized.plan.eager_peak_bytes) <= A_LOSS_BYTES


def summed(function, *inputs):
    """How many sums are in place, and how many gradients are added otherwise."""
    joint = joint_of(function, *inputs)
    adds = joint.module.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    return len(joint.sums), len(adds) - len(joint.sums)


def test_sums_overwrite_what_nobody_else_reads():
    x, w = leaf(6, 4), leaf(4, 4)
    assert summed(lambda x: (x.sin() * x.cos()).sum(), x) == (1, 0)
    assert summed(lambda x, w: (x @ w @ w).sin().sum(), x, w) == (1, 0)
    assert summed(lambda x: (x.sin() + x.cos()).sin().sum(), x) == (1, 1)  # a sum of the forward
    assert summed(lambda x: x.sum() + 2 * x.t().sum(), x) == (0, 2)  # expanded scalars


def test_gradients_of_outputs_are_not_overwritten():
    x = leaf(5)
    rematerialized = graph.rematerialize(Inputs(lambda x: (x.view(5), x * 1.0)), x)
    mine = [torch.ones(5), torch.ones(5)]
    for _ in range(2):
        torch.autograd.backward(rematerialized(x), mine)
    assert torch.equal(x.grad, torch.full((5,), 4.0))
    assert [gradient.tolist() for gradient in mine] == [[1.0] * 5] * 2


class Inputs(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


@few(1)
@pytest.mark.parametrize("options", [{}, {"keep": "memory"}])
def test_with_outputs_that_no_loss_reads(options):
    def outputs(x):
        h = x.sin()
        return h * h, h.cos() + h, (h @ h.t()).exp(), h.t(), h[:1] * h[1:]

    assert_like_eager(outputs, leaf(3, 3), **options)


def test_a_retained_graph_runs_twice():
    x = leaf(4, 4)
    function = Inputs(lambda x: (x @ x.t()).tanh() + x.sin() * x)
    results = []
    for call in (function, graph.rematerialize(function, x)):
        loss = call(x).sin().sum()
        results.append([torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)])
    assert all(torch.equal(gradient, results[0][0]) for pair in results for gradient in pair)


UNARY = [torch.sin, torch.tanh, lambda v: v.t(), lambda v: v * 2, lambda v: v[:3].repeat(2, 1)[:6], torch.relu,
         lambda v: v.softmax(-1), lambda v: F.dropout(v, 0.3), lambda v: v.flip(0), lambda v: v.reshape(36).view(6, 6)]
BINARY = [torch.add, torch.mul, torch.matmul, lambda a, b: torch.cat([a[:2], b[2:]]), lambda a, b: a.where(a > 0, b)]


class Program(nn.Module):
    """A random program in which values are read several times."""

    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        self.weight = nn.Parameter(torch.linspace(-1, 1, 36).view(6, 6))
        self.steps = [(draw.choice(UNARY), draw.random()) if draw.random() < 0.5 else
                      (draw.choice(BINARY), draw.random(), draw.random()) for _ in range(12)]

    def forward(self, x):
        values = [x, self.weight, x.sin()]
        for function, *places in self.steps:
            values.append(function(*(values[int(place * len(values))] for place in places)))
        return sum(value.sin().mean() * place for place, value in enumerate(values[3::2]))


@few(1)
@pytest.mark.parametrize("seed", [*range(3), *slow(range(3, 30))])
def test_random_programs(seed):
    model, x = Program(seed), leaf(6, 6)
    expected = step(model, (x,), torch.sum)
    for keep in (None, "memory"):
        assert_same(step(model, (x,), torch.sum, call=graph.rematerialize(model, x, keep=keep)), expected)
