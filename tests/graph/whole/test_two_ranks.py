"""DDP and FSDP2 around a traced module, on two ranks: as around the module itself, to the bit."""
from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.ranks import on_ranks
from tests.settings import with_gloo
from torchckpt import graph

STEPS = 3

pytestmark = with_gloo


class Model(nn.Module):
    def __init__(self, uses_all=True):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 8)) for _ in range(3)
        )
        self.unused, self.uses_all = nn.Linear(8, 8), uses_all

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.unused(x) if self.uses_all else x


def traced(module):
    return graph.rematerialize(module, keep="speed")


def ddp(model, wrap, **options):
    return DistributedDataParallel(wrap(model), **options)


def sharded(model, wrap):
    return fully_shard(wrap(model))


def layers_sharded(model, wrap):
    for place, block in enumerate(model.blocks):
        model.blocks[place] = fully_shard(wrap(block))
    return fully_shard(model)


CASES = {
    "DDP": ddp,
    "DDP, some unused": functools.partial(ddp, find_unused_parameters=True),
    "DDP, static": functools.partial(ddp, static_graph=True, gradient_as_bucket_view=True),
    "FSDP2": sharded,
    "FSDP2, by layers": layers_sharded,
}


def trained(make, wrap, uses_all, rank):
    """Parameters after some steps of an optimizer, on other data on each rank."""
    model = make(Model(uses_all), wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(STEPS):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(64, 8)).sin().sum().backward()
        optimizer.step()
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [parameter.detach().clone() for parameter in full]


def all_cases(rank):
    """Of each case, the parameters with the module itself, and traced."""
    results = {}
    for name, make in CASES.items():
        uses_all = "unused" not in name
        results[name] = [trained(make, wrap, uses_all, rank) for wrap in (lambda module: module, traced)]
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(all_cases, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_parameters_after_three_steps_are_those_of_the_module_itself(name, ranks):
    for rank in ranks:
        expected, received = rank[name]
        assert all(map(torch.equal, received, expected))
    assert all(map(torch.equal, ranks[0][name][1], ranks[1][name][1]))
    assert not all(map(torch.equal, ranks[0][name][1], [parameter.detach() for parameter in Model().parameters()]))
