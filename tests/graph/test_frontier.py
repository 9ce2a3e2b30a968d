"""frontier() of a call: its points, what a notebook shows, what is wrong with a call."""
from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import nn

from torchckpt import graph
from torchckpt.errors import ArgumentError
from torchckpt.planning.remat.search import planner

pytestmark = pytest.mark.usefixtures("quick_planner")


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(50))

    def forward(self, x, *, times=4):
        for _ in range(times):
            x = (x * self.weight).tanh()
        return x.sum()


@pytest.fixture(scope="module")
def curve():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_SEARCH_WORK", 1)
        return graph.frontier(Chain(), torch.ones(9, 50), points=4)


def test_example_by_keywords_is_the_same(curve):
    assert graph.frontier(Chain(), example_kwargs={"x": torch.ones(9, 50), "times": 4}, points=np.int64(4)) == curve
    assert graph.frontier(Chain(), torch.ones(9, 50), example_kwargs={"times": 1}, points=4) != curve


def test_notebook_shows_the_picture_and_the_table(curve):
    assert ElementTree.fromstring(curve._repr_svg_()).tag.endswith("svg")
    assert curve._repr_svg_() == curve.draw()
    assert f"Frontier of {len(curve)} plans" in curve._repr_html_()
    first, second, *others = str(curve).splitlines()
    assert first.split() == ["peak", "recompute", "of", "eager's"]
    assert second.split()[-2:] == ["+0.0%", "100%"]
    assert len(others) == len(curve) - 1


@pytest.mark.parametrize("points", [1, 0, -3, True, 2.5, "20", None])
def test_points(points):
    with pytest.raises(ArgumentError, match=r"points is not an integer of at least 2\n  received: points="):
        graph.frontier(Chain(), torch.ones(9, 50), points=points)


def test_no_example():
    with pytest.raises(ArgumentError, match=r"there are no inputs of a call\n  received: no example"):
        graph.frontier(Chain())
