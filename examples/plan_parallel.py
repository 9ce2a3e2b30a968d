"""Llama 3 70B on 64 GPUs, whose stages are parallelized, to plan its training before any GPU is rented.

    python -m torchckpt plan examples.plan_parallel:stages --mesh dp=2,tp=8 --device h100 --microbatches 32 \\
        --schedule all --svg plan.svg

Each of four stages is spread over the ranks of the mesh: tensor and sequence parallel over ``tp``, sharded by FSDP2
over ``dp``. With ``dp=2,tp=8`` that is 64 GPUs, as in ``examples/plan_job.py``. Nothing is run, and no other process is
started. ``parallelize`` is the code that a training script has, too.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
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

from examples.plan_llama import Block, Rotary, Size
from torchckpt import checkpoint

__all__ = ["Stage", "made", "parallelize", "stages", "tiny"]

SEQUENCE = Shard(1)
GATHERED = PrepareModuleInput(input_layouts=SEQUENCE, desired_input_layouts=Replicate())
BLOCK = {
    "attention_norm": SequenceParallel(),
    "attention": GATHERED,
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(output_layouts=SEQUENCE),
    "feed_forward_norm": SequenceParallel(),
    "feed_forward": GATHERED,
    "feed_forward.gate": ColwiseParallel(),
    "feed_forward.up": ColwiseParallel(),
    "feed_forward.down": RowwiseParallel(output_layouts=SEQUENCE),
}
"""Between its parts a block has a share of the sequence on each rank, and inside of them a share of the heads."""
ENDS = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Replicate()),
}


class Stage(nn.Module):
    """A row of blocks, each a region; the first stage begins with the embedding, the last one ends with the head."""

    def __init__(self, size: Size, place: int) -> None:
        super().__init__()
        rotary = Rotary(size)
        self.embedding = nn.Embedding(size.vocabulary, size.width) if place == 0 else None
        self.blocks = nn.ModuleList(Block(size, rotary) for _ in range(size.blocks // size.stages))
        is_last = place == size.stages - 1
        self.norm = nn.RMSNorm(size.width) if is_last else None
        self.head = nn.Linear(size.width, size.vocabulary, bias=False) if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x = checkpoint(block, x)
        if self.norm is None or self.head is None:
            return x
        return F.log_softmax(self.head(self.norm(x)).float(), -1)


def parallelize(stage: Stage, mesh: DeviceMesh) -> Stage:
    """Spread a stage over the ranks of ``mesh``, by its dimensions ``tp`` and ``dp``."""
    parallelize_module(stage, mesh["tp"], {name: way for name, way in ENDS.items() if getattr(stage, name) is not None})
    for block in stage.blocks:
        parallelize_module(block, mesh["tp"], BLOCK)
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(stage, mesh=mesh["dp"])


def made(size: Size, mesh: DeviceMesh) -> tuple[list[Stage], Tensor, Callable[[Tensor], Tensor]]:
    """The stages, a micro-batch of one rank of ``dp``, and the loss function of the last stage's output."""
    tokens = torch.randint(size.vocabulary, (size.rows, size.tokens))

    def loss(scores: Tensor) -> Tensor:
        return F.nll_loss(scores.flatten(0, 1), tokens.flatten())

    return [parallelize(Stage(size, place), mesh) for place in range(size.stages)], tokens, loss


def stages(mesh: DeviceMesh) -> tuple[list[Stage], Tensor, Callable[[Tensor], Tensor]]:
    """Llama 3 70B in four stages, in bfloat16 (Grattafiori et al., 2024)."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return made(Size(vocabulary=128256, tokens=8192, stages=4), mesh)
    finally:
        torch.set_default_dtype(before)


def tiny(mesh: DeviceMesh) -> tuple[list[Stage], Tensor, Callable[[Tensor], Tensor]]:
    """The same stages, in sizes that are counted at once."""
    return made(Size(4, 64, 8, 4, 224, 256, 32, 2, 2), mesh)
