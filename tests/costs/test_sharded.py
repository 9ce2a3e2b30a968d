"""Stages of shares of larger tensors are refused by name where no mesh was told: they would be counted wrong."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.distributed.ranks import one_rank
from tests.settings import with_gloo
from torchckpt.costs import pipeline_costs
from torchckpt.errors import ArgumentError

pytestmark = with_gloo


def layers():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))


def refusal(stages, x):
    with pytest.raises(ArgumentError, match="a tensor is sharded over ranks, and no mesh was told") as caught:
        pipeline_costs(lambda: (stages, x), "h100")
    return str(caught.value)


@pytest.fixture(autouse=True)
def alone():
    with one_rank():
        yield


@pytest.fixture
def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (1,))


def test_fsdp2(mesh):
    from torch.distributed.fsdp import fully_shard

    second = layers()
    for block in second:
        fully_shard(block, mesh=mesh)
    message = refusal([layers(), second], torch.ones(2, 8))
    assert "stage 1: 0.0.weight is a DTensor, as of tensor parallelism or FSDP2's fully_shard()" in message


def test_tensor_parallel(mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    stage = parallelize_module(layers(), mesh, {"1.0": ColwiseParallel()})
    message = refusal([stage], torch.ones(2, 8))
    assert "stage 0: 1.0.weight is a DTensor" in message
    assert "works:    with fake_mesh(dp=2, tp=4) as mesh: pipeline_costs(lambda: stages(mesh), device)" in message


def test_a_buffer_or_an_input(mesh):
    from torch.distributed.tensor import Replicate, distribute_tensor

    def replicated(value):
        return distribute_tensor(value, mesh, [Replicate()])

    stage = layers()
    stage.register_buffer("scale", replicated(torch.ones(8)))
    assert "stage 0: scale is a DTensor" in refusal([stage], torch.ones(2, 8))
    assert "an input of the first stage is a DTensor" in refusal([layers()], replicated(torch.ones(2, 8)))


def test_fsdp():
    from torch.distributed.fsdp import FullyShardedDataParallel

    with pytest.warns(UserWarning, match="NO_SHARD"):
        stage = nn.Sequential(FullyShardedDataParallel(layers(), device_id=torch.device("cpu")))
    assert "stage 0: 0 is a FullyShardedDataParallel" in refusal([stage], torch.ones(2, 8))
