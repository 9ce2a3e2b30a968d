"""``keep`` in random programs of nested regions, against the same programs without the library."""
from __future__ import annotations

import functools
import random

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils import checkpoint as torch_checkpoint

from tests.helpers import (
    assert_equal,
    gradients,
    leaf,
    plain,
)
from tests.slow import few
from torchckpt import checkpoint, keep


class Program:
    """A random program of nested regions and kept parts. ``run`` is the one that the library is held to."""

    STEPS = ("tanh", "dropout", "product", "in place", "noise", "halves", "matrix", "region", "keep", "keep")
    REGIONS = (
        checkpoint,
        functools.partial(checkpoint, early_stop=False, determinism_check="values"),
        functools.partial(torch_checkpoint.checkpoint, use_reentrant=False),
    )
    KEPT = ("plain", "counts", "dict", "changes its argument", "view", "argument", "no grad", "closed over")

    def __init__(self, seed: int) -> None:
        chosen = random.Random(seed)
        torch.manual_seed(seed)
        self.weights = [leaf(4, 4) for _ in range(3)]
        self.steps = self._steps(chosen, 0)

    def _steps(self, chosen, depth):
        return [self._step(chosen, chosen.choice(self.STEPS), depth) for _ in range(chosen.randint(1, 5))]

    def _step(self, chosen, kind, depth):
        inner = self._steps(chosen, depth + 1) if depth < 3 and kind in ("region", "keep") else [("tanh", None, [])]
        of = {"region": self.REGIONS, "keep": self.KEPT}
        return kind, chosen.choice(of.get(kind, range(3))), inner

    def run(self, with_library: bool, backward):
        torch.manual_seed(7)
        self.calls, self.is_regions = 0, with_library
        x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        for tensor in self.weights:
            tensor.grad = None
        y = self._region(self.REGIONS[0], functools.partial(self._body, self.steps), x.sin()).cos()
        calls = self.calls
        found = backward(y, [x, *self.weights])
        assert self.calls == calls
        return [y.detach(), calls, torch.rand(2), *found]

    def _region(self, call, function, x):
        return call(function, x) if self.is_regions else function(x)

    def _body(self, steps, x):
        for kind, how, inner in steps:
            x = self._done(kind, how, functools.partial(self._body, inner), x)
        return x

    def _done(self, kind, how, inner, x):
        if kind == "region":
            return self._region(how, inner, x)
        if kind == "keep":
            return self._kept(how, inner, x)
        if kind == "in place":
            return (x.clone().add_(1.0) * 1.5).sin_()
        simple = {
            "tanh": torch.tanh,
            "dropout": lambda x: nn.functional.dropout(x, 0.3),
            "product": lambda x: x * x.sin(),
            "noise": lambda x: x + torch.rand(4),
            "halves": lambda x: torch.cat([x[2:].cos(), x[:2]]),
            "matrix": lambda x: x @ self.weights[how],
        }
        return simple[kind](x)

    def _kept(self, how, inner, x):
        kept = keep if self.is_regions else plain
        if how == "counts":
            return kept(self._counted, inner, x)
        if how == "dict":
            found = kept(lambda x: {"a": (inner(x), None), "i": x.argmax(-1), "n": 3}, x)
            return found["a"][0].cos() * found["n"] + found["i"].unsqueeze(-1)
        if how == "changes its argument":
            x = x.clone()
            result = kept(lambda x: x.mul_(torch.rand(4) + 0.5).add_(1), x)
            return x.sin() + result
        if how == "closed over":
            y, other = x.clone(), x * 2
            kept(lambda: (y.mul_(torch.rand(4)), other.add_(1), 0)[2])
            return y * other
        if how == "view":
            return x * kept(lambda x: x.t(), x).t()
        if how == "argument":
            return x * kept(lambda x: x, x)
        if how == "no grad":
            with torch.no_grad():
                (result,) = kept(lambda x: (inner(x),), x)
            return x.tanh() + result
        return kept(inner, x)

    def _counted(self, inner, x):
        self.calls += 1
        return inner(x) * self.calls


def whole(y, leaves):
    return torch.autograd.grad(y.sum(), leaves, allow_unused=True)


def double(y, leaves):
    first = torch.autograd.grad(y.sum(), leaves, allow_unused=True, create_graph=True)
    squares = sum((gradient**2).sum() for gradient in first if gradient is not None)
    return [*first, *torch.autograd.grad(squares, leaves, allow_unused=True)] if squares.requires_grad else first


def retained(y, leaves):
    first = torch.autograd.grad(y.sum(), leaves, allow_unused=True, retain_graph=True)
    return [*first, *torch.autograd.grad(y.cos().sum(), leaves, allow_unused=True)]


def split(y, leaves):
    _, groups = stage_backward_input([y], [torch.ones_like(y)], leaves[:1], iter(leaves[1:]))
    stage_backward_weight(iter(leaves[1:]), groups)
    return gradients(*leaves)


@few(2)
@pytest.mark.parametrize("backward", [whole, double, retained, split])
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_programs(backward, first):
    done = 0
    for seed in range(first, first + 20):
        program = Program(seed)
        try:
            expected = program.run(False, backward)
        except RuntimeError:  # not every graph can be split
            continue
        assert_equal(program.run(True, backward), expected)
        done += 1
    assert done >= 10
