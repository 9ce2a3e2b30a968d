"""``keep`` and torch.compile: inside and around compiled code it runs once, outside of the graphs."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers import assert_equal, gradients, leaf, plain
from tests.slow import few
from torchckpt import checkpoint, keep

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # of Dynamo's own, at a graph break that a tensor with a graph crosses
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf"),
]


class Gated(nn.Module):
    """Its gate is another one at each call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.calls, self.kept = nn.Linear(4, 4), nn.Linear(4, 4), 0, keep

    @torch.compiler.disable
    def count(self):
        self.calls += 1
        return self.calls

    def gate(self, h):
        return self.second(h).softmax(-1) * self.count()

    def forward(self, x):
        h = self.first(x).tanh()
        return (self.kept(self.gate, h) * h).sin().cos()


def found(make):
    """Of two steps, of which the second compiles nothing: outputs and gradients."""
    module, seen = Gated(), []
    call = make(module)
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    for step in range(2):
        y = call(x)
        y.sum().backward()
        seen += [y.detach(), *(gradient.clone() for gradient in gradients(x, *module.parameters()))]
        assert module.calls == step + 1
    return seen


def without_library(module):
    module.kept = plain
    return module


@few(1)
@pytest.mark.parametrize(
    "make",
    [
        lambda module: torch.compile(module, backend="aot_eager"),
        lambda module: lambda x: checkpoint(torch.compile(module, backend="aot_eager"), x),
        lambda module: torch.compile(lambda x: checkpoint(module, x), backend="aot_eager"),
        lambda module: torch.compile(lambda x: checkpoint(lambda x: checkpoint(module, x), x), backend="aot_eager"),
    ],
    ids=["no region", "compiled inside a region", "a region inside what is compiled", "two regions"],
)
def test_it_runs_once(make):
    assert_equal(found(make), found(without_library))


def test_what_is_kept_may_be_compiled():
    def block(x):
        return keep(torch.compile(torch.exp, backend="eager"), x.tanh()).sin().cos()

    x = leaf(3)
    expected = torch.autograd.grad(x.tanh().exp().sin().cos().sum(), x)
    assert_equal(torch.autograd.grad(checkpoint(block, x).sum(), x), expected)


def test_a_full_graph_is_an_error_that_says_what_works():
    gated = Gated()
    compiled = torch.compile(lambda x: checkpoint(gated, x), backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"what torchckpt\.keep keeps is outside of compiled graphs"):
        compiled(leaf(3, 4))
