"""Which calls are blocks."""
from __future__ import annotations

from collections import OrderedDict

import pytest
from torch import nn

from tests.costs.models import MODELS, WIDTH, Mlp, Norms, Regions
from torchckpt import checkpoint_module
from torchckpt.costs import pipeline_costs
from torchckpt.costs.parts import repeated_children


def linear():
    return nn.Linear(WIDTH, WIDTH)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"layers": nn.ModuleList(Mlp() for _ in range(2)), "norm": nn.LayerNorm(WIDTH)})


LAYOUTS = [
    ([nn.Sequential(nn.Embedding(3, WIDTH), Mlp(), Mlp())], ["Mlp"] * 2),
    ([nn.Sequential(nn.Embedding(3, WIDTH), Mlp()), nn.Sequential(Mlp(), linear())], ["Mlp"] * 2),
    ([Wrapped()], ["Mlp"] * 2),
    ([Norms()], ["Sequential"] * 3),
    ([nn.Sequential(OrderedDict(a=nn.Sequential(Mlp(), Mlp()), b=nn.Sequential(Mlp(), Mlp())))], ["Mlp"] * 4),
    ([nn.Sequential(Mlp(), nn.LayerNorm(WIDTH), linear())], []),
    ([Mlp()], []),
    ([nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU())], ["Linear", "ReLU"] * 2),
]


@pytest.mark.parametrize(("stages", "names"), LAYOUTS)
def test_children_that_repeat(stages, names):
    assert [type(child).__name__ for child in repeated_children(stages)] == names


def test_regions_are_blocks_and_then_children_are_not():
    costs = pipeline_costs(MODELS["regions"], "h100")
    assert [len(stage.blocks) for stage in costs.stages] == [3, 3]


def test_modules_that_are_regions_are_blocks():
    def build():
        stages, example = MODELS["mlp"]()
        checkpoint_module(stages[0][1])
        return stages, example

    assert [len(stage.blocks) for stage in pipeline_costs(build, "h100").stages] == [1, 0]


def test_a_region_in_a_region_is_part_of_it():
    def build():
        stages, example = [nn.Sequential(Regions(), Regions())], MODELS["regions"]()[1]
        checkpoint_module(stages[0][0])
        return stages, example

    assert [len(stage.blocks) for stage in pipeline_costs(build, "h100").stages] == [1 + 3]
