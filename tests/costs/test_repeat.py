"""Blocks that are like two before them are not run, and cost the same."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.costs.models import MODELS, WIDTH, Mlp, vector
from torchckpt import checkpoint
from torchckpt.costs import fake_mesh, pipeline_costs
from torchckpt.costs.parts import Repeats


class Counting(nn.Module):
    """Notes its calls."""

    def __init__(self, calls, **attributes) -> None:
        super().__init__()
        self.inner = Mlp()
        self.calls = calls
        vars(self).update(attributes)

    def forward(self, x):
        self.calls.count += 1
        return self.inner(x)


class Calls:
    """One object that all blocks have."""

    def __init__(self) -> None:
        self.count = 0


def calls_of(*attributes, wrap=nn.Sequential):
    calls, x = Calls(), vector().requires_grad_()
    pipeline_costs(lambda: ([wrap(*(Counting(calls, **each) for each in attributes))], x), "h100")
    return calls.count


class Regions(nn.Sequential):
    def forward(self, x):
        for block in self:
            x = checkpoint(block, x)
        return x


def test_two_of_a_kind_are_run():
    assert calls_of(*[{}] * 6) == 2
    assert calls_of(*[{}] * 6, wrap=Regions) == 2
    assert calls_of(*[{"window": 8}] * 3, *[{"window": 16}] * 4) == 2 + 2
    assert calls_of(*({"window": 8, "layer": layer} for layer in range(5))) == 5


def everything(self, part, function, args, kwargs, stands):
    return function(*args, **kwargs)


@pytest.mark.parametrize("name", MODELS)
def test_costs_are_those_of_running_all(name, monkeypatch):
    costs = pipeline_costs(MODELS[name], "h100")
    monkeypatch.setattr(Repeats, "run", everything)
    assert pipeline_costs(MODELS[name], "h100").counted == costs.counted


@pytest.mark.parametrize(
    ("how", "mesh", "sizes"),
    [
        pytest.param("tp sp", {"tp": 2}, {}, marks=pytest.mark.slow),
        pytest.param("fsdp", {"dp": 4}, {"hidden": 90, "tokens": 15}, marks=pytest.mark.slow),
        ("fsdp tp sp", {"dp": 2, "tp": 2}, {}),
    ],
)
def test_costs_of_shares_are_those_of_running_all(how, mesh, sizes, monkeypatch):
    from tests.costs.parallel_models import Way, built

    way = Way(how, mesh, **sizes, blocks=5)

    def counted():
        with fake_mesh(**mesh) as there:
            return pipeline_costs(lambda: built(way, there), "h100").counted

    costs = counted()
    monkeypatch.setattr(Repeats, "run", everything)
    assert counted() == costs


def test_blocks_that_gather_otherwise_are_of_another_kind():
    """As where the last block stays gathered for its backward."""
    from torch.distributed.fsdp import fully_shard

    with fake_mesh(dp=2) as mesh:

        def build():
            blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
            for block in blocks:
                fully_shard(block, mesh=mesh, reshard_after_forward=block is not blocks[-1])
            return [fully_shard(nn.Sequential(*blocks), mesh=mesh)], vector().requires_grad_()

        parts = pipeline_costs(build, "h100").counted[0].blocks
    gathers = [[each.phase for each in part.collectives if each.kind == "all_gather"] for part in parts]
    assert gathers == [["forward", "backward"]] * 3 + [["forward"]]


def test_blocks_that_share_weights_are_run():
    calls = Calls()

    def build():
        block = Counting(calls)
        return [nn.Sequential(*[block] * 4, Mlp(), Mlp())], vector()

    pipeline_costs(build, "h100")
    assert calls.count == 4


def test_shards_of_a_later_dimension():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    def saved(dim):
        with fake_mesh(dp=2) as mesh:

            def build():
                blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()) for _ in range(3)]
                for block in blocks:
                    fully_shard(block, mesh=mesh, shard_placement_fn=lambda _: Shard(dim))
                return [fully_shard(nn.Sequential(*blocks), mesh=mesh)], torch.randn(4, WIDTH, requires_grad=True)

            return [part.work.saved_bytes for part in pipeline_costs(build, "h100").counted[0].blocks]

    assert saved(1) == saved(0)
