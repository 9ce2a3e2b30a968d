"""Meshes that are not there: what they stand in for, what they cost, and what is refused."""
from __future__ import annotations

import sys
from contextvars import copy_context
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.ranks import one_rank
from tests.helpers import in_thread
from tests.settings import with_gloo
from tests.slow import few
from torchckpt import ArgumentError, checkpoint
from torchckpt.costs import Collective, fake_mesh, pipeline_costs
from torchckpt.costs.mesh import Layout, sharded_over
from torchckpt.planning.device import Network, device_named
from torchckpt.planning.rates import RATES

pytestmark = with_gloo


class Tells(nn.Module):
    """A block that does ``talk`` between two products."""

    def __init__(self, talk, width=8) -> None:
        super().__init__()
        self.first, self.second, self.talk = nn.Linear(width, width), nn.Linear(width, width), talk

    def forward(self, x):
        return self.second(self.talk(self.first(x)).sin())


def of_blocks(talk, width=8, blocks=2):
    return lambda: ([nn.Sequential(*(Tells(talk, width) for _ in range(blocks)))], torch.randn(4, width))


def reduced(group):
    from torch.distributed._functional_collectives import all_reduce

    return lambda x: all_reduce(x, "sum", group)


def test_groups_are_dimensions_and_their_products():
    layout = Layout({"pp": 2, "dp": 2, "tp": 3}, 7)
    assert layout.dimensions_of((6, 7, 8)) == ("tp",)
    assert layout.dimensions_of((10, 7)) == ("dp",)
    assert layout.dimensions_of((1, 7)) == ("pp",)
    assert layout.dimensions_of((6, 7, 8, 9, 10, 11)) == ("dp", "tp")
    assert layout.dimensions_of((1, 4, 7, 10)) == ("pp", "dp")
    assert Layout({"dp": 1, "tp": 2}, 0).dimensions_of((0,)) == ("dp",)


def test_nothing_stays_behind():
    from torch.distributed.tensor import placement_types
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    before = sys.excepthook, placement_types.shard_dim_alltoall, ShardingPropagator._propagate_tensor_meta_non_cached
    for sizes in ({"dp": 2, "tp": 2}, {"tp": 8}):
        with fake_mesh(**sizes, rank=1) as mesh:
            assert (dist.get_rank(), mesh.mesh_dim_names) == (1, tuple(sizes))
        assert not dist.is_initialized()
    after = sys.excepthook, placement_types.shard_dim_alltoall, ShardingPropagator._propagate_tensor_meta_non_cached
    assert after == before


BAD = [
    ({}, "the sizes of a mesh are not whole numbers above 0, by the name of its dimension\n  received: no dimension"),
    ({"tp": 0}, "received: tp=0"),
    ({"tp": 2.0, "dp": 2}, "received: tp=2.0"),
    ({"tp": 2, "rank": 2}, "rank is not below 2, the number of ranks of the mesh\n  received: rank=2"),
]


@pytest.mark.parametrize(("sizes", "message"), BAD)
def test_bad_sizes(sizes, message):
    with pytest.raises(ArgumentError) as caught, fake_mesh(**sizes):
        pass
    assert message in str(caught.value)


def test_a_process_with_ranks_of_its_own():
    rule = r"fake_mesh\(\): this process has a process group already\n  received: one of 1 ranks, backend gloo"
    with one_rank(), pytest.raises(ArgumentError, match=rule), fake_mesh(tp=2):
        pass


def apart():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    (stage,), x = of_blocks(torch.sin)()
    stage.apart = nn.Parameter(distribute_tensor(torch.zeros(2), DeviceMesh("cpu", [0, 3]), [Shard(0)]))
    return [stage], x


@pytest.mark.parametrize("build", [lambda: of_blocks(reduced(dist.new_group([0, 3])))(), apart])
def test_ranks_that_are_no_dimension(build):
    with fake_mesh(dp=2, tp=2), pytest.raises(ArgumentError) as caught:
        pipeline_costs(build, "h100")
    assert "or DTensor is on ranks that are no dimension of the mesh, and no product of dimensions" in str(caught.value)
    assert "received: the ranks (0, 3), as rank 0 of dp=2, tp=2" in str(caught.value)


def test_a_device_without_a_network():
    with fake_mesh(tp=2) as mesh, pytest.raises(ArgumentError) as caught:
        pipeline_costs(of_blocks(reduced(mesh.get_group("tp"))), replace(device_named("h100"), network=None))
    rule = "the stages communicate, and the device has no network"
    assert f"{rule}\n  received: all_reduce over 'tp' on h100" in str(caught.value)


def test_shares_that_have_memory():
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    with fake_mesh(tp=2) as mesh:
        made = nn.Sequential(Tells(torch.sin), Tells(torch.sin))
        parallelize_module(made[1], mesh["tp"], {"first": ColwiseParallel()})
        with pytest.raises(ArgumentError, match=r"a share of a larger tensor has memory(.|\n)*0: 1.first.weight is"):
            pipeline_costs(lambda: ([made], torch.randn(4, 8)), "h100")


def test_fsdp1_hides_its_shares():
    from torch.distributed.fsdp import FullyShardedDataParallel

    with fake_mesh(dp=2):
        made = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
        with pytest.raises(ArgumentError, match=r"or is hidden by its module\n  received: stage 0: it is a Fully"):
            pipeline_costs(lambda: ([made], torch.randn(4, 8)), "h100")


def replicas(mesh):
    return nn.parallel.DistributedDataParallel(blocks(), process_group=mesh.get_group("dp"))


def replicated(mesh):
    from torch.distributed._composable.replicate import replicate

    return replicate(blocks(), device_mesh=mesh["dp"])


def pinning(mesh):
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    return fully_shard(blocks(), mesh=mesh["dp"], offload_policy=CPUOffloadPolicy())


def unpinned(mesh):
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    return fully_shard(blocks(), mesh=mesh["dp"], offload_policy=CPUOffloadPolicy(pin_memory=False))


def blocks():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))


DDP = (
    r"pipeline_costs\(\): DistributedDataParallel sends parameters to other ranks, and they have no values there\n"
    r"  received: DistributedDataParallel\(\), or replicate\(\)\n  works:    the plain module; or fully_shard\(\)"
)
PINNED = (
    r"memory is pinned where tensors have none\n  received: pin_memory\(\), or CPUOffloadPolicy\(\)\n"
    r"  works:    tensors that are not pinned; of fully_shard\(\) CPUOffloadPolicy\(pin_memory=False\)"
)


@pytest.mark.parametrize(("make", "rule"), [(replicas, DDP), (replicated, DDP), (pinning, PINNED)])
def test_what_asks_for_memory_is_named(make, rule):
    with fake_mesh(dp=2) as mesh, pytest.raises(ArgumentError, match=rule):
        pipeline_costs(lambda: ([make(mesh)], torch.ones(2, 8)), "h100")


def test_without_a_mesh_too():
    def build():
        return [nn.parallel.DistributedDataParallel(blocks())], torch.ones(2, 8)

    with one_rank(), pytest.raises(ArgumentError, match=DDP):
        pipeline_costs(build, "h100")


def test_what_its_error_says_works():
    with fake_mesh(dp=2) as mesh:
        plain, sharded = (
            pipeline_costs(lambda make=make: ([make(mesh)], torch.ones(2, 8)), "h100").counted[0].static.weights
            for make in (lambda _: blocks(), unpinned)
        )
    assert (plain, sharded) == (2 * 4 * 72, 4 * 72)


SLOW = replace(device_named("h100"), name="slow", network=Network(8, 1e3, 1e3, 0.0, 0.0, 0.25, "made up"))
"""4 x 8 float32 numbers take 0.378 s of an all-reduce of 2 ranks."""


def test_a_block_waits_for_a_collective():
    with fake_mesh(tp=2) as mesh:
        told = pipeline_costs(of_blocks(reduced(mesh.get_group("tp"))), SLOW)
        plain = pipeline_costs(of_blocks(lambda x: x), SLOW)
    block, without = told.stages[0].blocks[1], plain.stages[0].blocks[1]
    assert block.forward_seconds == pytest.approx(without.forward_seconds + 0.25 + 128e-3)
    assert block.recompute_seconds == pytest.approx(without.recompute_seconds + 0.25 + 128e-3)
    assert block.input_grad_seconds == pytest.approx(without.input_grad_seconds + 0.25 + 128e-3)
    assert block.weight_grad_seconds == pytest.approx(without.weight_grad_seconds)
    phases = ("forward", "backward", "replay")
    expected = tuple(Collective("all_reduce", 128, 2, "tp", phase, 1) for phase in phases)
    assert told.counted[0].blocks[1].collectives == expected


def sharded(width, mesh, **options):
    from torch.distributed.fsdp import fully_shard

    def build():
        (stage,), x = of_blocks(torch.sin, width)()
        for block in stage:
            fully_shard(block, mesh=mesh, **options)
        return [fully_shard(stage, mesh=mesh, **options)], x.requires_grad_()

    return build


def test_what_fsdp_gathers_runs_beside_the_block():
    fast = replace(device_named("h100"), name="fast", network=Network(8, 1e18, 1e18, 0.0, 0.0, 0.0, "made up"))
    with fake_mesh(dp=2) as mesh:
        hidden, waited = (pipeline_costs(sharded(8, mesh), device).stages[0].blocks[0] for device in (fast, SLOW))
    gather = 0.25 + 2 * (8 * 8 + 8) * 4 / 2 / 1e3
    assert waited.forward_seconds == gather  # in place of the work, which is hidden
    assert waited.input_grad_seconds + waited.weight_grad_seconds == 2 * gather
    assert waited.recompute_seconds == pytest.approx(hidden.recompute_seconds)  # gathered already


def test_what_is_gathered_takes_a_share_of_a_known_device_though_it_is_hidden():
    networks = [Network(8, speed, speed, 0.0, 0.0, 0.0, "made up") for speed in (1e18, 1e9)]
    devices = [replace(device_named("h100"), network=network) for network in networks]
    with fake_mesh(dp=2) as mesh:
        hidden, shared = (pipeline_costs(sharded(8, mesh), device).stages[0].blocks[0] for device in devices)
    gather = 2 * (8 * 8 + 8) * 4 / 2 / 1e9
    assert shared.forward_seconds == pytest.approx(hidden.forward_seconds + RATES["h100"].unhidden * gather)


def both_ways(mesh):
    """Linear layers, split over ``tp``, and all shared over ``dp``; a norm; and a table of indices."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8), nn.LayerNorm(8)) for _ in range(2)))
    for layer in layers:
        layer.register_buffer("table", torch.zeros(3, dtype=torch.int64))
        parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    return [layers], torch.ones(4, 8)


def test_static_bytes_by_what_is_sharded_over_what():
    with fake_mesh(dp=2, tp=4) as mesh:
        costs = pipeline_costs(lambda: both_ways(mesh), "h100")
    counted = costs.counted[0]
    both = (2 * 8 * 24 + 24) // 8  # all but the bias of the second layer
    assert {over: held.weights for over, held in counted.sharded.items()} == {
        "": 2 * 3 * 8, "dp": 2 * 4 * (8 + 2 * 8) // 2, "dp_tp": 2 * 4 * both,
    }  # fmt: skip
    assert [sum(held) for held in zip(*counted.sharded.values())] == list(counted.static)
    for over, (weights, gradients, optimizer) in counted.sharded.items():
        assert (gradients, optimizer) == ((weights, 2 * weights) if over else (0, 0)), over
    rows = [line.split() for line in str(costs).split("\n")]
    assert ["stage", "sharded", "over", *counted.static._fields] in rows
    assert ["0", "dp_tp", "4.08e-07", "GB", "4.08e-07", "GB", "8.16e-07", "GB"] in rows
    with fake_mesh(dp=1, tp=1) as mesh:
        alone = pipeline_costs(lambda: both_ways(mesh), "h100")
    assert list(alone.counted[0].sharded) == [""]
    assert "sharded over" not in str(alone)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_what_fsdp_leaves_whole_is_gathered_and_its_shares_are_static(is_frozen):
    """A frozen stage has no backward, and the outermost module stays whole after its forward."""

    def build(leaves_whole):
        (stage,), x = sharded(8, mesh, reshard_after_forward=not leaves_whole)()
        stage.requires_grad_(not is_frozen).set_reshard_after_backward(not leaves_whole)
        return [stage, blocks()], x.detach()

    with fake_mesh(dp=2) as mesh:
        left, freed = (pipeline_costs(partial(build, each), "h100").counted[0] for each in (True, False))
    assert set(left.sharded) == {"dp"}
    assert left.static == freed.static == ((576, 0, 0) if is_frozen else (576, 576, 2 * 576))
    assert left.gathered_bytes >= freed.gathered_bytes + 576 * is_frozen  # torch 2.15 gathers the others otherwise


def test_a_sharding_has_one_name_and_what_other_ranks_have_has_none():
    from torch.distributed.tensor import DeviceMesh, DTensor, Shard

    with fake_mesh(dp=2, tp=2) as mesh:
        crossed = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("tp", "dp"))
        others = DeviceMesh("cpu", [2, 3], mesh_dim_names=("tp",))
        tensors = [
            DTensor.from_local(torch.ones(2, 2), each, [Shard(axis) for axis in range(each.ndim)], run_check=False)
            for each in (mesh, crossed, mesh["tp"], others)
        ]
        assert [*map(sharded_over, tensors), sharded_over(torch.ones(2))] == ["dp_tp", "dp_tp", "tp", "", ""]


@few(1)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_one_rank_copies_what_several_gather(dtype):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    def counted(ranks):
        with fake_mesh(dp=ranks) as mesh:
            build = sharded(8, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
            return pipeline_costs(build, "h100").counted[0]

    one, two = counted(1), counted(2)
    assert [part.work.saved_bytes for part in one.parts] == [part.work.saved_bytes for part in two.parts]
    assert 0 < one.gathered_bytes < two.gathered_bytes
    assert all(part.collectives == () for part in one.parts)


def test_shares_that_are_padded_are_not_gathered():
    def gathered(rank):
        with fake_mesh(rank=rank, dp=4) as mesh:
            return pipeline_costs(sharded(5, mesh), "h100").counted[0].gathered_bytes

    assert len({gathered(rank) for rank in range(4)}) == 1


def collectives(build):
    parts = pipeline_costs(build, "h100").counted[0].parts
    return sorted((c.phase, c.kind, c.dimension, c.count) for part in parts for c in part.collectives)


def test_a_block_that_stays_gathered_for_its_backward():
    from torch.distributed.fsdp import fully_shard

    with fake_mesh(dp=2) as mesh:

        def build():
            (stage,), x = of_blocks(torch.sin, 8, blocks=4)()
            for block in stage:
                fully_shard(block, mesh=mesh, reshard_after_forward=block is not stage[-1])
            return [fully_shard(stage, mesh=mesh)], x.requires_grad_()

        parts = pipeline_costs(build, "h100").counted[0].blocks
    gathers = [[each.phase for each in part.collectives if each.kind == "all_gather"] for part in parts]
    assert gathers == [["forward", "backward"]] * 3 + [["forward"]]


def test_the_table_is_of_a_block_whose_collectives_all_are_there():
    """Without a gradient for the input, the reduction of the first block comes after the backward of all."""
    with fake_mesh(dp=2) as mesh:

        def build():
            (stage,), x = sharded(8, mesh)()
            return [stage], x.detach()

        costs = pipeline_costs(build, "h100")
    assert [each.kind for each in costs.counted[0].blocks[0].collectives] == ["all_gather", "all_gather"]
    table = str(costs).partition("a block")[2].splitlines()[1:]
    assert [row.split()[:2] for row in table] == [
        ["forward", "all_gather"], ["backward", "all_gather"], ["backward", "reduce_scatter"]
    ]  # fmt: skip


def test_shards_of_a_later_dimension():
    from torch.distributed.tensor import Shard

    def saved(dim):
        with fake_mesh(dp=2) as mesh:
            build = sharded(8, mesh, shard_placement_fn=lambda weight: Shard(dim if weight.dim() > 1 else 0))
            return [part.work.saved_bytes for part in pipeline_costs(build, "h100").counted[0].blocks]

    assert saved(1) == saved(0)


def test_hybrid_shards_reduce_over_copies():
    with fake_mesh(copies=2, dp=2) as mesh:
        assert collectives(sharded(8, mesh)) == [
            ("backward", "all_gather", "dp", 1), ("backward", "all_gather", "dp", 1),
            ("backward", "all_reduce", "copies", 1), ("backward", "all_reduce", "copies", 1),
            ("backward", "reduce_scatter", "dp", 1), ("backward", "reduce_scatter", "dp", 1),
            ("forward", "all_gather", "dp", 1), ("forward", "all_gather", "dp", 1),
        ]  # fmt: skip


def test_a_mesh_that_torch_makes_of_the_mesh():
    """FSDP2 splits the dimension in two, and reads the numbers of the ranks."""
    with fake_mesh(node=2, dp=2) as mesh:
        flat = mesh["node", "dp"]._flatten("all")
        counted = collectives(sharded(8, flat, reshard_after_forward=2))
    assert counted.count(("backward", "all_gather", "dp", 1)) == 2
    assert counted.count(("forward", "all_gather", "node_dp", 1)) == 2


def test_shards_move_as_on_an_accelerator():
    from torch.distributed.tensor import DTensor, Shard

    class Turns(nn.Linear):
        def forward(self, x):
            rows = DTensor.from_local(super().forward(x), mesh["tp"], [Shard(0)])
            return rows.redistribute(placements=[Shard(1)]).to_local().sin()

    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Turns(8, 8)

        def forward(self, x):
            return checkpoint(self.inner, x)

    with fake_mesh(tp=2) as mesh:
        (block,) = pipeline_costs(lambda: ([Region()], torch.randn(4, 8)), "h100").counted[0].blocks
    assert [each.kind for each in block.collectives] == ["all_to_all"] * 3


def test_kernels_of_an_accelerator():
    """Attention and norms there have strategies of DTensor, too."""
    from tests.costs.parallel_models import Way, built

    way = Way("fsdp tp sp", {"dp": 2, "tp": 2}, blocks=2)
    with fake_mesh(**way.mesh) as mesh:
        names = ("accelerator", "cpu")
        there, here = (pipeline_costs(lambda: built(way, mesh), "h100", kernels=name) for name in names)
    ours, theirs = there.counted[0].blocks[0], here.counted[0].blocks[0]
    assert ours.collectives == theirs.collectives
    assert ours.work.saved_bytes < theirs.work.saved_bytes


def test_other_threads_and_contexts_are_inside_of_a_mesh_too():
    """It is of the process, as its group is."""
    entered = fake_mesh(tp=2)
    mesh = copy_context().run(entered.__enter__)
    try:
        costs = in_thread(pipeline_costs, of_blocks(reduced(mesh.get_group("tp"))), "h100")
    finally:
        entered.__exit__(None, None, None)
    assert {one.dimension for one in costs.counted[0].blocks[0].collectives} == {"tp"}
    assert not dist.is_initialized()
    assert not pipeline_costs(of_blocks(torch.sin), "h100").counted[0].blocks[0].collectives
