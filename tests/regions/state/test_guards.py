"""Buffers that code updates under ``if not is_recomputing()``: a replay uses what the forward used."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers import by_hand, leaf, plain, prefetched
from torchckpt import Pipe, checkpoint, is_recomputing


class Guarded(nn.Module):
    """Uses a running average before its guarded update, behind it, or both; and one that has no guard."""

    def __init__(self, use, update):
        super().__init__()
        self.linear, self.use, self.update, self.calls = nn.Linear(4, 4), use, update, 0
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("free", torch.ones(4))

    def forward(self, x):
        h = self.linear(x)
        z = h * self.mean.clone().cos() if "before" in self.use else h
        if not is_recomputing():
            self.calls += 1
            if self.update == "replaced":
                self.mean = self.mean * 0.5 + h.mean(0).detach()
            else:
                self.mean.mul_(0.5).add_(h.detach().mean(0))
        if self.update == "and another":
            self.free.mul_(0.7).add_(h.detach().mean(0))
            z = z * self.free.clone().sin()
        return (z * self.mean.clone()).sin() if "behind" in self.use else z.sin()


def nested(function, x):
    return checkpoint(lambda x: checkpoint(function, x), x)


def program(call, use, update, twice):
    torch.manual_seed(0)
    module, function = Guarded(use, update), nn.Dropout(0.3)

    def region(x):
        h = function(module(x))
        return module(h) if twice else h

    losses, inputs = [], [leaf(3, 4) for _ in range(3)]
    for x in inputs:  # several forwards, which move the buffers, before the backwards
        losses.append(call(region, call(module, x)).sum())
    for loss in losses:
        loss.backward()
    values = [*(x.grad for x in inputs), *(p.grad for p in module.parameters()), *module.buffers(), torch.rand(2)]
    return [*values, torch.tensor(module.calls)]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("update", ["in place", "replaced", "and another"])
@pytest.mark.parametrize("use", ["before", "behind", "before and behind"])
@pytest.mark.parametrize("call", [checkpoint, by_hand, prefetched, nested])
def test_as_in_plain_training(call, use, update, twice):
    received, expected = (program(how, use, update, twice) for how in (call, plain))
    assert all(map(torch.equal, received, expected))


def test_in_a_pipe():
    def step(checkpoint):
        torch.manual_seed(0)
        layers = nn.Sequential(Guarded("behind", "in place"), Guarded("before and behind", "replaced"))
        pipe = Pipe(layers, [1, 1], chunks=3, checkpoint=checkpoint)
        pipe(torch.randn(6, 4)).sum().backward()
        return [*(p.grad for p in pipe.parameters()), *pipe.buffers()]

    assert all(map(torch.equal, step("always"), step("never")))


def test_one_trial_shows_what_stands_under_a_guard():
    runs = []

    class Counted(Guarded):
        def forward(self, x):
            runs.append(is_recomputing())
            return super().forward(x)

    module = Counted("behind", "in place")
    for _ in range(3):
        checkpoint(module, leaf(3, 4)).sum().backward()
    assert runs == [False, True, True, False, True, False, True]
    runs.clear()
    module.use, module.update = "before", "and another"
    checkpoint(module, leaf(3, 4)).sum().backward()
    checkpoint(module, leaf(3, 4)).sum().backward()
    assert runs == [False, True, True, False, True]


def test_a_question_alone_needs_no_trial():
    runs = []

    def function(x):
        runs.append(is_recomputing())
        return nn.functional.batch_norm(x, None, None, training=True).sin()

    module = nn.BatchNorm1d(4)
    checkpoint(lambda x: module(function(x)).sin(), leaf(3, 4)).sum().backward()
    assert runs == [False, True]
    assert module.num_batches_tracked == 1


def test_on_streams(device):
    module, x = Guarded("before and behind", "in place").to(device), leaf(3, 4, device=device)
    expected = [torch.autograd.grad(plain(module, x).sum(), [x, *module.parameters()])]
    module.mean.fill_(1)
    received = [torch.autograd.grad(prefetched(module, x).sum(), [x, *module.parameters()])]
    assert all(map(torch.equal, received[0], expected[0]))
