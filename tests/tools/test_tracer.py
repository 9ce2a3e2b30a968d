"""The tracer of torch.distributed.pipelining: regions set before the trace vanish, those set on its stages work."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.fx
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline

from tests.distributed.ranks import attempted, on_ranks
from tests.slow import few
from torchckpt import checkpoint, checkpoint_layers, checkpoint_module
from torchckpt.distributed import recompute_ahead
from torchckpt.errors import ArgumentError, RegionError
from torchckpt.regions.wrap.module import is_checkpointed
from torchckpt.testing import count_recomputes

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch's own, about its tree specs
]
RANKS, COUNT, ROWS, SIZE = 2, 4, 2, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x):
        return x + nn.functional.dropout(self.second(nn.functional.gelu(self.first(x))), 0.2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def traced(model, stages=RANKS):
    split = {f"layers.{4 * at // stages}": SplitPoint.BEGINNING for at in range(1, stages)}
    return pipeline(model, mb_args=(torch.randn(ROWS, SIZE),), split_spec=split)


def loss_of(output, target):
    return (output - target).square().mean()


# on two ranks ---------------------------------------------------------------------------------------------------------


def trained(with_regions, **options):
    """Losses, gradients, parameters and the next random numbers of two steps, and how often regions were replayed."""
    rank = dist.get_rank()
    pipe = traced(Model())
    if with_regions:
        checkpoint_layers(pipe.get_stage_module(rank), "layers.*")
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, COUNT, loss_fn=loss_of)
    schedule = recompute_ahead(schedule, **options) if with_regions else schedule
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    x, target = torch.randn(2, COUNT * ROWS, SIZE, generator=torch.Generator().manual_seed(1))
    seen, recomputed = [], []
    for number in range(2):
        torch.manual_seed(100 * number + rank)
        losses: list[torch.Tensor] = []
        with count_recomputes() as recomputes:
            schedule.step(*([x] if rank == 0 else []), **({"target": target, "losses": losses} if rank else {}))
        recomputed.append(recomputes.total)
        optimizer.step()
        gradients = [parameter.grad.clone() for parameter in stage.submod.parameters()]
        parameters = [parameter.detach().clone() for parameter in stage.submod.parameters()]
        seen += [*(loss.detach() for loss in losses), *gradients, *parameters, torch.rand(2)]
        optimizer.zero_grad()
    return seen, recomputed


def work(rank):
    return {
        "plain": attempted(trained, False),
        "all": attempted(lambda: trained(True, exempt="none")),
        "auto": attempted(lambda: trained(True)),
    }


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    return on_ranks(work, tmp_path_factory.mktemp("ranks"), RANKS, timeout=120)


@pytest.mark.parametrize(("how", "on_each_rank"), [("all", [2 * COUNT, 2 * COUNT]), ("auto", [2 * (COUNT - 1), 0])])
def test_regions_that_are_set_on_the_traced_stages(reported, how, on_each_rank):
    for report, recomputes in zip(reported, on_each_rank):
        expected, none = report["plain"]
        tensors, recomputed = report[how]
        assert none == [0, 0]
        assert recomputed == [recomputes, recomputes]
        assert len(tensors) == len(expected) > 0
        assert all(map(torch.equal, tensors, expected))


# the error ------------------------------------------------------------------------------------------------------------

RULE = "a traced stage has no region: the trace leaves out those that were set before it"
WORKS = 'torchckpt.checkpoint_layers(pipe.get_stage_module(0), "layers.*"), and then pipe.build_stage(0, device)'
RECEIVED = "stage 0, a GraphModule as pipeline() makes one, without a region"


@pytest.fixture
def stage(alone):
    """Of a model whose regions were set before the trace."""
    model = Model()
    checkpoint_layers(model, Block)
    return traced(model, 1).build_stage(0, torch.device("cpu"))


@few(1)
@pytest.mark.parametrize("options", [{"exempt": "none"}, {"budget": "1GB"}, {"segments": 1}], ids=str)
def test_regions_that_were_set_before_the_trace(stage, options):
    with pytest.raises(ArgumentError) as caught:
        recompute_ahead(ScheduleGPipe(stage, COUNT, loss_fn=loss_of), **options)
    assert str(caught.value) == f"recompute_ahead(): {RULE}\n  received: {RECEIVED}\n  works:    {WORKS}"


def test_a_stage_that_keeps_everything_needs_none(stage):
    schedule = recompute_ahead(ScheduleGPipe(stage, COUNT, loss_fn=loss_of), exempt={(0, i) for i in range(COUNT)})
    schedule.step(*torch.randn(1, COUNT * ROWS, SIZE), target=torch.randn(COUNT * ROWS, SIZE))


def test_the_call_of_the_message_works(stage):
    handle = checkpoint_layers(stage.submod, "layers.*")
    schedule = recompute_ahead(ScheduleGPipe(stage, COUNT, loss_fn=loss_of), exempt="none")
    x = torch.randn(COUNT * ROWS, SIZE)
    schedule.step(x, target=x)
    with count_recomputes() as recomputes:
        schedule.step(x, target=x)
    assert recomputes.total == 4 * COUNT
    handle.remove()
    with count_recomputes() as recomputes:
        schedule.step(x, target=x)
    assert recomputes.total == 0


def test_regions_that_are_gone_before_the_first_step(stage):
    handle = checkpoint_layers(stage.submod, "layers.*")
    schedule = recompute_ahead(ScheduleGPipe(stage, COUNT, loss_fn=loss_of), exempt="none")
    handle.remove()
    x = torch.randn(COUNT * ROWS, SIZE)
    with pytest.raises(RegionError) as caught:
        schedule.step(x, target=x)
    assert str(caught.value).endswith(f"received: {RECEIVED}\n  works:    {WORKS}")


class Own(nn.Module):
    """A class of the user's own, which may enter regions by itself."""

    def __init__(self, inner) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args)


def test_a_class_of_the_users_own_in_a_traced_stage_is_left_to_the_first_step(stage):
    layers = stage.submod.get_submodule("layers")
    setattr(layers, "0", Own(getattr(layers, "0")))
    recompute_ahead(ScheduleGPipe(stage, COUNT, loss_fn=loss_of), exempt="none")


@torch.fx.wrap
def region_of(x):
    return checkpoint(lambda x: torch.nn.functional.dropout(x, 0.2).sin().cos(), x)


def test_a_graph_that_calls_a_function_that_enters_regions_recomputes(alone):
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Linear(SIZE, SIZE)

        def forward(self, x):
            return region_of(self.tower(x))

    stage = PipelineStage(torch.fx.symbolic_trace(Named()), 0, 1, torch.device("cpu"))
    schedule = recompute_ahead(ScheduleGPipe(stage, COUNT, loss_fn=loss_of), exempt="none")
    x = torch.randn(COUNT * ROWS, SIZE)
    with count_recomputes() as recomputes:
        schedule.step(x, target=x)
    assert recomputes.total == COUNT


def test_the_example_of_the_message_is_of_the_stage(alone):
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Linear(SIZE, SIZE)

        def forward(self, x):
            return self.tower(x)

    stage = pipeline(Named(), mb_args=(torch.randn(ROWS, SIZE),)).build_stage(0, torch.device("cpu"))
    with pytest.raises(ArgumentError, match=r'checkpoint_layers\(pipe.get_stage_module\(0\), "tower"\)'):
        recompute_ahead(ScheduleGPipe(stage, COUNT, loss_fn=loss_of), exempt="none")


def test_regions_set_after_the_trace_stay_through_build_stage(alone):
    pipe = traced(Model(), 1)
    checkpoint_module(pipe.get_stage_module(0).get_submodule("layers.0"))
    stage = pipe.build_stage(0, torch.device("cpu"))
    assert [name for name, child in stage.submod.named_modules() if is_checkpointed(child)] == ["layers.0"]
