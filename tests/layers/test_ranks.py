"""Two ranks: DDP, FSDP2, and layers that communicate."""
from __future__ import annotations

import copy
import warnings

import torch
import torch.distributed as dist
from torch import nn

import torchckpt
from tests.distributed.ranks import on_ranks
from tests.layers.models import Model, Wide
from tests.settings import with_gloo
from torchckpt.testing import count_recomputes

pytestmark = with_gloo


class Sum(Wide):
    """A block whose output is that of all ranks."""

    def forward(self, x):
        y = super().forward(x)
        dist.all_reduce(y.detach().clone())
        return y


def steps(model, plain, rank):
    """How many calls each of four steps recomputes, and whether gradients are those of ``plain``. Lengths differ."""
    counts, same = [], True
    for _ in range(4):
        x = torch.randn(4, 16 + 8 * rank, 16)
        for own in (plain, model):
            torch.manual_seed(1)
            with count_recomputes() as counted:
                own(x).square().mean().backward()
        pairs = zip(model.parameters(), plain.parameters())
        same = same and all(torch.equal(full(one.grad), full(other.grad)) for one, other in pairs)
        model.zero_grad()
        plain.zero_grad()
        counts.append(counted.total)
    return counts, same


def full(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def of_wrapped(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain, found = Model([Wide(16, 64) for _ in range(4)]), {}
    wrapped = copy.deepcopy(plain)
    torchckpt.checkpoint_layers(wrapped, "layers.*", budget="80%")
    wrap = nn.parallel.DistributedDataParallel
    found["ddp"] = steps(wrap(wrapped), wrap(copy.deepcopy(plain)), rank)
    sharded, mesh = [copy.deepcopy(plain), copy.deepcopy(plain)], init_device_mesh("cpu", (2,))
    torchckpt.checkpoint_layers(sharded[0], "layers.*", budget="80%")
    for model in sharded:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    found["fsdp"] = steps(*sharded, rank)
    return found


def of_sums(rank):
    torch.manual_seed(0)
    model = Model([Sum(16, 64) for _ in range(4)])
    plain = copy.deepcopy(model)
    torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = steps(model, plain, 0)
    return found, [str(one.message) for one in caught if "communicate" in str(one.message)]


def test_ranks_with_inputs_of_their_own_length_plan_for_themselves(tmp_path):
    for found in on_ranks(of_wrapped, tmp_path):
        for counts, same in found.values():
            assert counts[0] == 4
            assert 0 < counts[1] == counts[3] < 4
            assert same


def test_layers_that_communicate_are_all_recomputed(tmp_path):
    for (counts, same), said in on_ranks(of_sums, tmp_path):
        assert counts == [4, 4, 4, 4]
        assert same
        assert len(said) == 1
