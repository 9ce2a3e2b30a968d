"""Operations that are there for what they do: a check of a traced call is made in each call, once."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.graph.eager import compare
from tests.slow import few
from torchckpt import graph

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Checked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.first(x).tanh()
        torch._assert_async((h < 2).all(), "too large")
        return self.second(h).sin()


class Printing(Checked):
    def forward(self, x):
        h = self.first(x).tanh()
        torch.ops.aten._print("one call")
        return self.second(h).sin().exp()


OPTIONS = [{}, {"keep": "memory"}, {"budget": "95%"}]


@few(1)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.usefixtures("gradients_go")
def test_check_of_a_value(options):
    model, x = Checked(), torch.randn(30, 4)
    step = graph.rematerialize(model, x, **options)
    compare(model, step, x)
    with pytest.raises(RuntimeError, match="too large"):
        step(x * float("nan"))


def test_check_inside_of_a_region():
    model, x = Checked(), torch.randn(30, 4)
    step = graph.rematerialize(nn.Sequential(nn.Linear(4, 4), _InRegion(model)), x)
    with pytest.raises(RuntimeError, match="too large"):
        step(x * float("nan"))


class _InRegion(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return graph.region(self.inner)(x)


@few(1)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_is_printed_is_printed_once(options, capfd):
    model, x = Printing(), torch.randn(30, 4)
    step = graph.rematerialize(model, x, **options)
    capfd.readouterr()
    step(x).sum().backward()
    assert capfd.readouterr().out.count("one call") == 1


def test_gradients_of_what_prints():
    model, x = Printing(), torch.randn(30, 4)
    compare(model, graph.rematerialize(model, x, keep="memory"), x)
