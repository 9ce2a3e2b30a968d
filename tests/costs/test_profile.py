"""Stages that are run for their seconds, by a clock that moves only where a test says so."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchckpt import ArgumentError, checkpoint
from torchckpt.costs import fake_mesh, pipeline_costs
from torchckpt.costs.profile import device_here

WIDTH = 8


class Now:
    """The time, and the clock that tells it."""

    seconds = 0.0

    def __init__(self, device: torch.device) -> None:
        pass

    def stamp(self) -> float:
        return Now.seconds

    def reader(self):
        return float


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr("torchckpt.costs.profile.Clock", Now)
    monkeypatch.setattr("torchckpt.costs.pipeline.device_here", lambda: torch.device("cpu"))


class Takes(torch.autograd.Function):
    """A product; a forward takes ``seconds``, a backward twice as many."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        Now.seconds += seconds
        ctx.save_for_backward(x, weight)
        ctx.seconds = seconds
        return x @ weight

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight = ctx.saved_tensors
        Now.seconds += 2 * ctx.seconds
        return gradient @ weight.T, x.T @ gradient, None


class Layer(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.eye(WIDTH)), seconds

    def forward(self, x: Tensor) -> Tensor:
        return Takes.apply(x, self.weight, self.seconds)


class Stage(nn.Module):
    """A layer, blocks of 1, 2 and 3 seconds, and a layer."""

    def __init__(self, is_region: bool) -> None:
        super().__init__()
        self.first, self.last, self.is_region = Layer(10.0), Layer(20.0), is_region
        self.blocks = nn.ModuleList(map(Layer, (1.0, 2.0, 3.0)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x) if self.is_region else block(x)
        return self.last(x)


def stages(is_region=False):
    return [Stage(is_region), Stage(is_region)], torch.randn(4, WIDTH)


@pytest.mark.parametrize("is_region", [False, True])
def test_the_seconds_are_those_of_the_run(is_region):
    costs = pipeline_costs(lambda: stages(is_region), "h100", profile=True)
    for stage in costs.stages:
        assert [block.forward_seconds for block in stage.blocks] == [1, 2, 3]
        assert [block.recompute_seconds for block in stage.blocks] == [1, 2, 3]
        assert (stage.before.forward_seconds, stage.after.forward_seconds) == (10, 20)
    stage = costs.stages[1]
    assert [block.input_grad_seconds for block in stage.blocks] == [2, 4, 6]
    assert (stage.before.input_grad_seconds, stage.after.input_grad_seconds) == (20, 40)
    assert "seconds of this cpu, link 450 GB/s" in str(costs)


def test_a_weight_gradient_is_what_a_backward_for_inputs_alone_saves():
    """A linear layer computes what is asked for; time is counted by product."""

    class Ticking(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            Now.seconds += operator is torch.ops.aten.mm.default
            return operator(*args, **(kwargs or {}))

    def build():
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()) for _ in range(3)]
        return [nn.Sequential(*layers)], torch.randn(4, WIDTH, requires_grad=True)

    with Ticking():
        costs = pipeline_costs(build, "h100", profile=True)
    for block in costs.stages[0].blocks:
        assert (block.forward_seconds, block.input_grad_seconds, block.weight_grad_seconds) == (1, 1, 1)
        assert 0 < block.recompute_seconds < 1  # what it saves last is the input of the activation


def test_bytes_are_those_that_are_counted():
    counted, run = (pipeline_costs(stages, "h100", profile=profile) for profile in (False, True))
    for one, other in zip(counted.stages, run.stages):
        assert (one.saved_bytes, one.least_bytes, one.static_bytes) == (
            other.saved_bytes, other.least_bytes, other.static_bytes
        )  # fmt: skip


def test_a_stage_with_other_blocks_when_it_runs():
    made = []

    def build():
        made.append(Stage(is_region=False))
        if len(made) > 1:
            made[-1].blocks.append(Layer(4.0))
        return [made[-1]], torch.randn(4, WIDTH)

    with pytest.raises(ArgumentError, match=r"other blocks when it runs\n.*stage 0: 4 in place of 3\n"):
        pipeline_costs(build, "h100", profile=True)


def test_ranks_that_are_not_there_do_not_run():
    wrong = "profile runs on one device, and the ranks of a fake_mesh"
    with fake_mesh(tp=2), pytest.raises(ArgumentError, match=wrong):
        pipeline_costs(stages, "h100", profile=True)


def test_a_stage_that_does_not_run():
    def build():
        return [nn.Sequential(Layer(1.0), Layer(1.0))], torch.randn(4, WIDTH)

    def build_meta():
        (stage,), x = build()
        return [stage.to("meta")], x

    with pytest.raises(ArgumentError, match="stage 0 does not run on the example"):
        pipeline_costs(build_meta, "h100", profile=True)


@pytest.mark.accelerator
def test_an_accelerator_is_taken_where_there_is_one(accelerator, monkeypatch):
    monkeypatch.undo()
    assert device_here().type == accelerator.type
    assert f"seconds of this {accelerator.type}" in str(pipeline_costs(stages, "h100", profile=True))
