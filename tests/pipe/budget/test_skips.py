"""Skips that are also the output of their stage: with a budget a stage has parts, and gradients add up as without."""
from __future__ import annotations

import weakref
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from tests.settings import without_collector
from tests.slow import few, slow_but
from torchckpt import Pipe
from torchckpt.errors import ArgumentError
from torchckpt.pipe.skip import pop, stash

SIZE = 16


class Stashes(nn.Module):
    def __init__(self, *names):
        super().__init__()
        self.names, self.linear = names, nn.Linear(SIZE, SIZE)

    def forward(self, x):
        x = self.linear(x).tanh()
        for name in self.names:
            stash(name, x)
        return x


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return x + self.linear(self.norm(x)).tanh()


class Passing(nn.Module):
    """Returns what it gets, and something new."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return {"x": x, "y": self.linear(x).sin()}


class Passed(Skipping):
    """Takes what :class:`Passing` returns."""

    def forward(self, x):
        return super().forward(x["x"]) + x["y"]


class Pops(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name, self.linear = name, nn.Linear(SIZE, SIZE)

    def forward(self, x):
        x = x["x"] * x["y"] if isinstance(x, dict) else x
        skip = pop(self.name)
        return x + self.linear(skip) * skip.cos()


class InPlace(nn.Module):
    def forward(self, x):
        return x["x"].mul_(2) + x["y"] if isinstance(x, dict) else x.mul_(2)


MODELS = {
    "behind a block": (lambda: [Stashes("a"), Skipping(), Pops("a")], [1, 2]),
    "in the first block": (lambda: [Stashes("a"), Pops("a"), Skipping()], [1, 2]),
    "two names": (lambda: [Stashes("a", "b"), Skipping(), Pops("b"), Skipping(), Pops("a")], [1, 4]),
    "by several blocks": (lambda: [Skipping(), Stashes("a"), nn.Identity(), Skipping(), Skipping(), Pops("a")], [2, 4]),
    "passed on": (lambda: [Stashes("a"), Passing(), Pops("a"), Skipping()], [1, 3]),
    "inside of a stage": (lambda: [Skipping(), Stashes("a"), Skipping(), Pops("a")], [1, 3]),
    "across a stage": (lambda: [Stashes("a"), Skipping(), Skipping(), Skipping(), Pops("a")], [1, 2, 2]),
    "across a block that passes it on": (lambda: [Stashes("a"), Passing(), Passed(), Pops("a")], [1, 1, 2]),
    "through a block that returns it": (lambda: [Stashes("a"), nn.Identity(), nn.Identity(), Pops("a")], [2, 1, 1]),
}


def gradients(layers, balance, in_graph, steps=3, chunks=4, **options):
    """Those of some steps, of which the first one is counted."""
    torch.manual_seed(0)
    pipe, seen = Pipe(nn.Sequential(*layers()), balance, chunks=chunks, **options), []
    x, y = torch.randn(16, SIZE), torch.randn(16, SIZE)
    for _ in range(steps):
        pipe.zero_grad()
        if in_graph:
            mse_loss(pipe(x), y).backward()
        else:
            pipe.step(x, y, loss_fn=mse_loss)
        seen += [parameter.grad.clone() for parameter in pipe.parameters()]
    return seen


@few(2)
@pytest.mark.parametrize("in_graph", [False, True], ids=["step", "backward"])
@pytest.mark.parametrize(
    ("model", "budget"),
    slow_but([("across a stage", "1GB"), *product(MODELS, ["95%"])], product(MODELS, ["1GB", "95%"])),
)
def test_gradients_are_those_without_a_budget(model, budget, in_graph):
    expected = [gradients(*MODELS[model], in_graph, checkpoint=checkpoint) for checkpoint in ("never", "always")]
    seen = gradients(*MODELS[model], in_graph, budget=budget)
    if in_graph and model == "across a stage":  # where the two differ: then each visit has those of what becomes of it
        assert all(map(torch.allclose, seen, expected[0]))
        return
    assert all(torch.equal(a, b) for each in expected for a, b in zip(seen, each, strict=True))


@pytest.mark.parametrize("between", [[], [Passing]], ids=["next", "later"])
@pytest.mark.parametrize("in_graph", [False, True], ids=["step", "backward"])
def test_a_change_in_place_of_what_a_later_block_pops_is_refused(in_graph, between):
    def layers():
        return [Stashes("a"), *(layer() for layer in between), InPlace(), Skipping(), Pops("a")]

    with pytest.raises(ArgumentError, match="it shares memory with another tensor or with a skip"):
        gradients(layers, [1, *(1 for _ in between), 3], in_graph, steps=1, chunks=1, budget="1GB")


def test_nothing_of_a_skip_is_left():
    alive = []

    class Watched(Stashes):
        def forward(self, x):
            x = super().forward(x)
            alive.append(weakref.ref(x.untyped_storage()))
            return x

    with without_collector():
        gradients(lambda: [Watched("a"), Skipping(), Pops("a")], [1, 2], in_graph=True, budget="1GB")
        assert [storage() for storage in alive] == [None] * len(alive)
