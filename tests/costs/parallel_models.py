"""A transformer that its code parallelizes, on a mesh of real or of fake ranks; ``LAYOUTS`` by name."""
from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import torchckpt

__all__ = ["LAYOUTS", "Way", "built"]

ROWS, WORDS = 2, 64

all_gather = getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd
"""Its name since 2.13, and before."""


class Way(NamedTuple):
    """What a model is, and how it is parallelized."""

    how: str
    mesh: dict[str, int]
    hidden: int = 96
    tokens: int = 16
    blocks: int = 3


class Attention(nn.Module):
    """With context parallelism a rank has its queries, and gathers all keys and values."""

    def __init__(self, context: dist.ProcessGroup | None, keeps: bool) -> None:
        super().__init__()
        self.context, self.keeps = context, keeps
        self.q, self.k, self.v, self.out = (nn.Linear(64, size, bias=False) for size in (64, 32, 32, 64))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.context is not None:
            gather = partial(torchckpt.keep, all_gather) if self.keeps else all_gather
            k, v = (gather(y.contiguous(), 2, self.context) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.context is None, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(64, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(FeedForward):
    """An expert on each rank. Tokens are sent to theirs, and back; each expert has as many."""

    def __init__(self, hidden: int, group: dist.ProcessGroup) -> None:
        super().__init__(hidden)
        self.group, self.router = group, nn.Linear(64, group.size(), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens, ranks = x.flatten(0, 1), self.group.size()
        scores = self.router(tokens).softmax(-1)
        expert = torch.zeros(len(tokens), dtype=torch.long) + torch.arange(len(tokens)) % ranks
        order, splits = expert.argsort(stable=True), [len(tokens) // ranks] * ranks
        sent = funcol.all_to_all_single_autograd(tokens[order], splits, splits, self.group)
        home = funcol.all_to_all_single_autograd(super().forward(sent), splits, splits, self.group)
        return (torch.zeros_like(tokens).index_copy(0, order, home) * scores.gather(1, expert[:, None])).view_as(x)


class Block(nn.Module):
    def __init__(self, way: Way, context: dist.ProcessGroup | None, experts: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(64), nn.RMSNorm(64)
        self.attention = Attention(context, "keep" in way.how.split())
        self.feed_forward = FeedForward(way.hidden) if experts is None else Experts(way.hidden, experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


OUT = "attention.out", "feed_forward.down"
TENSOR = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | dict.fromkeys(OUT, RowwiseParallel())
TENSOR |= {f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")}
GATHER = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
SEQUENCE = TENSOR | dict.fromkeys(OUT, RowwiseParallel(output_layouts=Shard(1)))
SEQUENCE |= {"attention": GATHER, "feed_forward": GATHER, "norm_1": SequenceParallel(), "norm_2": SequenceParallel()}


def built(way: Way, mesh: DeviceMesh):
    """The one stage, a micro-batch, and where the loss is parallel, the loss."""
    how = way.how.split()
    context, experts = (mesh[name].get_group() if name in how else None for name in ("cp", "ep"))
    model = nn.Sequential(*(Block(way, context, experts) for _ in range(way.blocks)))
    for block in model:
        if "tp" in how:
            parallelize_module(block, mesh["tp"], SEQUENCE if "sp" in how else TENSOR)
        if "fsdp" in how:
            fully_shard(block, mesh=mesh["dp"])
    parts = (way.mesh["tp"] if "sp" in how else 1) * (way.mesh["cp"] if "cp" in how else 1)
    x = torch.randn(ROWS, way.tokens // parts, 64, requires_grad=True)
    loss = []
    if "lp" in how:
        model.append(nn.Linear(64, WORDS, bias=False))
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model[-1], mesh["tp"], head)
        words = torch.randint(WORDS, (ROWS * way.tokens,))
        loss = [lambda logits: F.cross_entropy(logits.flatten(0, 1).float(), words)]
    if "fsdp" in how:
        fully_shard(model, mesh=mesh["dp"])
    return ([model], x, *loss)


UNEVEN = {"hidden": 90, "tokens": 15}
LAYOUTS = {
    2: [
        Way("tp", {"tp": 2}, blocks=2),
        Way("tp sp", {"tp": 2}, blocks=2),
        Way("tp sp lp", {"tp": 2}, blocks=2),
        Way("fsdp", {"dp": 2}),  # of its blocks the first, the last and those between differ
        Way("ep", {"ep": 2}, blocks=2),
        Way("cp", {"cp": 2}, blocks=2),
        Way("cp keep", {"cp": 2}, blocks=2),
    ],
    4: [
        Way("fsdp", {"dp": 4}, **UNEVEN),
        Way("fsdp tp", {"dp": 2, "tp": 2}),
        Way("fsdp tp sp", {"dp": 2, "tp": 2}),
        Way("tp sp lp", {"tp": 4}),
        Way("fsdp ep", {"dp": 2, "ep": 2}),
        Way("cp tp", {"cp": 2, "tp": 2}),
    ],
}  # fmt: skip
"""By the number of ranks."""
