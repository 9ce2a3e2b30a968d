"""FSDP2 and DDP in both orders, and apply_activation_checkpointing: as without the library, to the bit."""
from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)

import torchckpt
from tests.distributed.ranks import attempted, on_ranks
from tests.tools.steps import ROWS, STEPS, Block, Model, equal, rows, trained
from torchckpt import checkpoint_layers

RANKS = 2

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")

WRAPPER = functools.partial(CheckpointWrapper, checkpoint_fn=torchckpt.checkpoint)


# the ways -------------------------------------------------------------------------------------------------------------


def by_layers(model):
    checkpoint_layers(model, Block)


def by_wrapper(model):
    apply_activation_checkpointing(model, WRAPPER, check_fn=lambda module: isinstance(module, Block))


def by_nothing(model):
    pass


def ddp(model):
    return nn.parallel.DistributedDataParallel(model)


def fsdp2(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2_around_ddp(model):
    """Hybrid: sharded over one dimension of the mesh, replicated over the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPS = {"ddp": ddp, "fsdp2": fsdp2, "fsdp2, replicated": fsdp2_around_ddp}
WAYS = {"checkpoint_layers": by_layers, "apply_activation_checkpointing": by_wrapper}
ORDERS = ("regions first", "wrapper first")


def steps_of(wrap, prepare, order="regions first"):
    model = Model()
    if order == "regions first":
        prepare(model)
    wrapped = wrap(model)
    if order == "wrapper first":
        prepare(wrapped)
    batches = rows().roll(dist.get_rank(), 0).split(ROWS)
    return trained(wrapped, lambda batch: wrapped(batch).square().mean(), batches)


def work(rank):
    found = {}
    for name, wrap in WRAPS.items():
        found[name] = attempted(steps_of, wrap, by_nothing)
        for way, prepare in WAYS.items():
            for order in ORDERS:
                found[name, way, order] = attempted(steps_of, wrap, prepare, order)
    return found


# what is held of it ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    return on_ranks(work, tmp_path_factory.mktemp("ranks"), RANKS, timeout=120)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WRAPS)
def test_wrapper_in_both_orders(reported, name, way, order):
    for report in reported:
        expected, none = report[name]
        assert none == {}
        assert not isinstance(report[name, way, order], str), report[name, way, order]
        tensors, recomputes = report[name, way, order]
        assert equal(tensors, expected)
        assert sum(recomputes.values()) == 3 * STEPS
        assert {region.removeprefix("FSDP").removesuffix(".forward") for region in recomputes} == {"Block"}


def test_ranks_have_losses_of_their_own(reported):
    assert not torch.equal(reported[0]["ddp"][0][0], reported[1]["ddp"][0][0])


# one process ----------------------------------------------------------------------------------------------------------


def one_process(prepare):
    model = Model()
    prepare(model)
    return trained(model, lambda batch: model(batch).square().mean(), rows().split(ROWS))


@pytest.mark.parametrize("options", [{}, {"determinism_check": "values"}, {"preserve_rng_state": True}], ids=str)
def test_apply_activation_checkpointing(options):
    wrapper = functools.partial(WRAPPER, **options)

    def prepare(model):
        keys = list(model.state_dict())
        apply_activation_checkpointing(model, wrapper, check_fn=lambda module: isinstance(module, Block))
        assert list(model.state_dict()) == keys

    expected, none = one_process(by_nothing)
    tensors, recomputes = one_process(prepare)
    assert none == {}
    assert equal(tensors, expected)
    assert sum(recomputes.values()) == 3 * STEPS
