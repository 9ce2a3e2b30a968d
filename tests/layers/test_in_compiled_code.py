"""Steps that compiled code runs, backwards with them: what a budget counts there, nobody compiles."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from torchckpt import Pipe, checkpoint_layers


class Block(nn.Linear):
    def forward(self, x):
        return x + torch.nn.functional.dropout(super().forward(x).tanh(), 0.1)


class Eager(nn.Module):
    """What Dynamo leaves as it is, inside of a step that it compiles."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    @torch.compiler.disable
    def forward(self, x):
        return self.model(x)


def layers(blocks, budget):
    checkpoint_layers(blocks, Block, budget=budget)
    return blocks


def pipe(blocks, budget):
    return Pipe(blocks, [2, 2], devices=["cpu", "cpu"], chunks=2, budget=budget)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace", "ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("way", [layers, pipe])
def test_no_bookkeeping_of_a_budget_is_compiled(fresh_dynamo, way):
    """Dynamo compiled what counts bytes at the end of a backward, and broke off in the middle of making weak references
    to storages: each wrote that its ``__del__`` had failed."""
    blocks = nn.Sequential(*(Block(8, 8) for _ in range(4)))
    frames, gradients = [], []
    for budget in (None, "90%"):
        model = way(copy.deepcopy(blocks), budget)
        eager, received = Eager(model), []

        @torch.compile(backend="aot_eager")
        def step(x):
            eager(x).square().sum().backward()  # noqa: B023

        counters.clear()
        torch._dynamo.reset()
        for seed in range(4):
            torch.manual_seed(seed)
            step(torch.randn(64, 8))
            received += [weight.grad.clone() for weight in model.parameters()]
            model.zero_grad()
        frames.append(counters["frames"]["total"])
        gradients.append(received)
    assert frames[1] <= frames[0]
    assert all(map(torch.equal, *gradients))
