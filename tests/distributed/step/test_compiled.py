"""Compiled blocks under ``recompute_ahead``, in every order: regions first, and then compile, is torchtitan's."""
from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from tests.distributed.stages import OLD, ROWS, SIZE, batch, schedule_on, stages_of, step
from tests.slow import few
from torchckpt import checkpoint_module
from torchckpt.distributed import recompute_ahead
from torchckpt.errors import RegionError
from torchckpt.testing import count_recomputes

pytestmark = [
    pytest.mark.usefixtures("alone", "fresh_dynamo"),
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf"),
]
NAME, COUNT = "ScheduleInterleaved1F1B", 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x):
        return x + nn.functional.dropout(self.second(nn.functional.gelu(self.first(x))), 0.2)


def layers(stage):
    with torch.random.fork_rng():
        torch.manual_seed(stage)
        return nn.Sequential(Block(), Block())


class Runs:
    """The backend eager, which counts how often its graphs run."""

    runs = 0

    def __call__(self, graph, inputs):
        def run(*args):
            self.runs += 1
            return graph(*args)

        return run


def regions_then_compile(stage, backend):
    module = layers(stage)
    for block in module:
        checkpoint_module(block)
        block.compile(fullgraph=True, backend=backend)
    return module


def compile_then_regions(stage, backend):
    module = layers(stage)
    for block in module:
        block.compile(fullgraph=True, backend=backend)
        checkpoint_module(block)
    return module


def regions_of_compiled(stage, backend):
    module = nn.Sequential(*(torch.compile(block, fullgraph=True, backend=backend) for block in layers(stage)))
    for block in module:
        checkpoint_module(block)
    return module


def trained(make, prepare, backend=None):
    """Losses and gradients of two steps, and the replays of the second: the first runs forwards for shapes, too."""
    stages = stages_of(NAME, make)
    schedule = prepare(schedule_on(stages, NAME, COUNT))
    torch.manual_seed(1)
    losses = [*step(schedule, stages, *batch(COUNT))]
    if backend is not None:
        backend.runs = 0
    with count_recomputes() as recomputes:
        losses += step(schedule, stages, *batch(COUNT))
    gradients = [parameter.grad for stage in stages for parameter in stage.submod.parameters()]
    return [*losses, *gradients], recomputes.total


@pytest.mark.slow
@pytest.mark.skipif(OLD, reason="torch 2.11 alone: gloo cannot send to itself")
def test_split_backwards_of_compiled_blocks_within_a_budget():
    """A backward that is whole when AOTAutograd compiles it, as in torch's search for shapes, cannot be split later."""
    static = torch.zeros(ROWS, SIZE, requires_grad=True)

    def drive(make, prepare):
        torch.manual_seed(0)
        name = "ScheduleInterleavedZeroBubble"
        stages = stages_of(name, make, input_args=static, output_args=static)
        schedule = prepare(schedule_on(stages, name, COUNT))
        losses = [loss for _ in range(6) for loss in step(schedule, stages, *batch(COUNT))]
        return [*losses, *(parameter.grad for stage in stages for parameter in stage.submod.parameters())]

    received = drive(partial(regions_then_compile, backend="aot_eager"), partial(recompute_ahead, budget="1GB"))
    assert all(map(torch.equal, received, drive(layers, lambda schedule: schedule)))


SEGMENTS = pytest.param({"segments": 0}, marks=pytest.mark.slow)


@few(1)
@pytest.mark.parametrize("order", [regions_then_compile, compile_then_regions, regions_of_compiled])
@pytest.mark.parametrize("options", [{}, {"exempt": "none"}, SEGMENTS], ids=str)
def test_compiled_blocks_are_recomputed_ahead(order, options):
    backend = Runs()
    expected, _ = trained(layers, lambda schedule: schedule)
    ahead = partial(recompute_ahead, **options)
    received, recomputes = trained(lambda stage: order(stage, backend), ahead, backend)
    assert all(map(torch.equal, received, expected))
    assert recomputes == (16 if "exempt" in options or "segments" in options else 8)
    assert backend.runs == 2 * 2 * COUNT + recomputes


@few(1)
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("options", [{}, {"budget": "1GB"}], ids=str)
def test_a_stage_that_is_compiled_with_its_regions_is_an_error_that_says_what_works(options):
    def make(stage):
        module = layers(stage)
        for block in module:
            checkpoint_module(block)
        module.compile(backend="aot_eager")
        return module

    with pytest.raises(RegionError) as caught:
        trained(make, partial(recompute_ahead, **options))
    assert str(caught.value) == (
        "a stage that is to be recomputed has no region\n"
        "  received: stage 0, with Block '0' inside of compiled code\n"
        "  works:    for block in stage_module.layers: torchckpt.checkpoint_module(block); block.compile()"
    )


def test_a_region_inside_of_compiled_code_beside_others_is_a_warning():
    def make(stage):
        module = layers(stage)
        for block in module:
            checkpoint_module(block)
        return nn.Sequential(module[0], torch.compile(nn.Sequential(module[1]), backend="aot_eager"))

    with pytest.warns(UserWarning, match=r"received: stage \d, with Block '1._orig_mod.0'"):
        trained(make, recompute_ahead)
