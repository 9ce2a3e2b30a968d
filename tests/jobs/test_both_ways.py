"""A description of a model costs what the model's own code costs, parallelized over ranks that are not there."""
from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import fully_shard

from examples import plan_llama, plan_parallel
from tests.slow import few, rarely
from torchckpt.costs import fake_mesh, pipeline_costs
from torchckpt.jobs import MACHINES, Job, Layout, Model, Software, memory_of, model_named
from torchckpt.jobs.layer import LayerWork, saved_of

SIZE = plan_llama.Size(4, 64, 8, 4, 224, 256, 32, rows=2, stages=1)
TOKENS = SIZE.rows * SIZE.tokens
SIZES = {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 4, "ffn": 224, "vocab": 256}
BF16 = Software(parameter_bytes=2.0, gradient_bytes=2.0, stops_early=True, regathers=False)
GENERATOR = 24
"""Attention saves the state of the generator, of which a description knows nothing."""


class SwiGLU(torch.autograd.Function):
    """As fused kernels do, it saves its inputs alone."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, gradient: Tensor):
        gate, up = ctx.saved_tensors
        share = gate.sigmoid()
        return gradient * up * share * (1 + gate * (1 - share)), gradient * F.silu(gate)


@pytest.fixture(params=rarely([(2, 2)], [(2, 2), (1, 4), (4, 1)]), ids=lambda sizes: "dp {} x tp {}".format(*sizes))
def both(request, monkeypatch, tmp_path):
    """What is counted of a rank's own code, and the job of a file."""
    dp, tp = request.param
    monkeypatch.setattr(
        plan_llama.FeedForward, "forward", lambda self, x: self.down(SwiGLU.apply(self.gate(x), self.up(x)))
    )
    with fake_mesh(dp=dp, tp=tp) as mesh:
        counted = pipeline_costs(lambda: plan_parallel.made(SIZE, mesh), "h100", dtype="bf16").counted[0]
    (tmp_path / "tiny.json").write_text(json.dumps(SIZES))
    layout = Layout(
        gpus=dp * tp, tp=tp, dp=dp, micro_batch=SIZE.rows, global_batch=4 * SIZE.rows * dp, sequence=SIZE.tokens,
        recompute="full", state="fsdp2", software=BF16,
    )  # fmt: skip
    return counted, Job(model_named(str(tmp_path / "tiny.json")), layout, MACHINES["h100"])


@few(1)
def test_both_ways_give_the_same_costs(both):
    counted, job = both
    block, tp = counted.blocks[1], job.layout.tp
    assert sorted(block.collectives) == sorted(job.collectives)
    masked = 2 * TOKENS * SIZE.tokens * SIZE.width / tp  # torch's counter has the masked half of the scores as well
    assert block.forward_flops == LayerWork(job.model, job.layout, job.machine).flops + masked
    scales = 2 * 4 * TOKENS / tp  # that of each norm and token, which descriptions leave out
    assert block.work.saved_bytes == job.work[True].saved.whole + scales + GENERATOR
    assert block.work.boundary_bytes == job.work[True].saved.boundary
    (memory,) = memory_of(job)
    angles = 2 * 2 * SIZE.tokens * SIZE.head  # of rotations: two buffers
    assert sum(part.work.static_bytes for part in counted.parts) == memory.static + angles
    assert counted.static == (memory.weights + angles, memory.gradients, memory.optimizer)
    assert [counted.parameters] == [sum(held) / job.layout.dp for held in job.rank_parameters]


class Experts(nn.Module):
    """Eight experts, two for each token, over the ranks of a group; as many tokens come to each."""

    group = None

    def __init__(self, size: plan_llama.Size) -> None:
        super().__init__()
        self.router = nn.Linear(size.width, 8, bias=False)
        self.first = nn.Parameter(torch.randn(8 // self.group.size(), size.width, 2 * size.hidden))
        self.last = nn.Parameter(torch.randn(8 // self.group.size(), size.hidden, size.width))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        order = chosen.flatten().argsort() // 2
        here = self.told(tokens[order]).view(len(self.first), -1, x.shape[-1])
        done = torch.bmm(SwiGLU.apply(*torch.bmm(here, self.first).chunk(2, -1)), self.last)
        found = self.told(done.flatten(0, 1)) * scores.flatten()[:, None]
        return torch.zeros_like(tokens).index_add(0, order, found).view(x.shape)

    def told(self, rows: Tensor) -> Tensor:
        splits = [len(rows) // self.group.size()] * self.group.size()
        return all_to_all_single_autograd(rows, splits, splits, self.group)


def spread(stage: nn.Module, mesh) -> nn.Module:
    """By FSDP2, but for the experts."""
    held = {weight for block in stage.blocks for weight in (block.feed_forward.first, block.feed_forward.last)}
    for block in stage.blocks:
        fully_shard(block, mesh=mesh["dp"], ignored_params=held)
    return fully_shard(stage, mesh=mesh["dp"], ignored_params=held)


@pytest.mark.slow
def test_both_ways_give_the_same_costs_of_experts(monkeypatch):
    monkeypatch.setattr(plan_llama, "FeedForward", Experts)
    monkeypatch.setattr(plan_parallel, "parallelize", spread)
    with fake_mesh(dp=4, tp=1) as mesh:
        monkeypatch.setattr(Experts, "group", mesh["dp"].get_group())
        counted = pipeline_costs(lambda: plan_parallel.made(SIZE, mesh), "h100", dtype="bf16").counted[0]
    model = Model("", **SIZES, experts=8, active=2, expert_ffn=SIZE.hidden)
    layout = Layout(
        gpus=4, dp=4, ep=4, micro_batch=SIZE.rows, global_batch=16 * SIZE.rows, sequence=SIZE.tokens,
        recompute="full", state="fsdp2", software=BF16,
    )  # fmt: skip
    job, block = Job(model, layout, MACHINES["h100"]), counted.blocks[1]
    own = [each._replace(dimension="ep") if each.kind == "all_to_all" else each for each in block.collectives]
    assert sorted(own) == sorted(job.collectives)
    assert block.forward_flops == job.work[False].flops + 2 * TOKENS * SIZE.tokens * SIZE.width
    assert block.work.boundary_bytes == job.work[False].saved.boundary
    routing = TOKENS * (8 * 2 + 2 * 8 + 2 * 8 + 2 * 2)  # probabilities, two times indices, scores
    found = 2 * TOKENS * 2 * 2 * SIZE.width  # what index_add and the product before it save
    assert block.work.saved_bytes == job.work[False].saved.whole + 2 * 4 * TOKENS + GENERATOR + routing + found
    (memory,) = memory_of(job)
    angles = 2 * 2 * SIZE.tokens * SIZE.head
    assert counted.static == (memory.weights + angles, memory.gradients, memory.optimizer)


@few(1)
@pytest.mark.parametrize(
    ("device", "dp", "tp"), [("h100", 16, 1), ("a100", 2, 8), pytest.param("h100", 2, 8, marks=pytest.mark.slow)]
)
def test_both_ways_take_the_same_seconds(device, dp, tp):
    """Within 10 %: own code has a product each for queries, keys and values, and other kernels of eager mode."""
    size = plan_llama.Size(2, 8192, 64, 8, 28672, 128256, 8192, stages=1)
    with fake_mesh(dp=dp, tp=tp) as mesh:
        counted = pipeline_costs(lambda: plan_parallel.made(size, mesh), device, dtype="bf16").counted[0]
    layout = Layout(
        gpus=dp * tp, tp=tp, dp=dp, global_batch=dp, recompute="full", state="fsdp2",
        software=replace(BF16, kernels="eager", attention="flash2"),
    )  # fmt: skip
    own = counted.blocks[1].work
    described = Job(model_named("llama3-70b"), layout, MACHINES[device]).stages[0].blocks[1]
    assert own.forward_seconds == pytest.approx(described.forward_seconds, rel=0.1)
    backwards = [block.input_grad_seconds + block.weight_grad_seconds for block in (own, described)]
    assert backwards[0] == pytest.approx(backwards[1], rel=0.1)
    assert own.recompute_seconds == pytest.approx(described.recompute_seconds, rel=0.1)


def test_megatron_keeps_shares_and_gathers_them_again():
    model, layout = model_named("llama3-8b"), Layout(gpus=8, tp=8)
    shares, wholes = (saved_of(model, replace(layout, software=software)).whole for software in (Software(), BF16))
    assert wholes - shares == 2 * layout.tokens * 2 * model.hidden * 7 / 8
