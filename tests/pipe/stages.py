"""Stages without a ``Pipe``: what its parts are tested with."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchckpt.pipe.microbatch import gather, scatter
from torchckpt.pipe.partition import Layer, Stage, partition
from torchckpt.pipe.run.pipeline import run_pipeline
from torchckpt.pipe.run.visit import Regions


def stages_of(modules: Sequence[nn.Module], balance: Sequence[int] | None = None, devices: Any = None) -> list[Stage]:
    """A stage for each module, or of as many as ``balance`` says."""
    layers = [Layer(str(number), module) for number, module in enumerate(modules)]
    balance = balance or [1] * len(layers)
    return partition(layers, balance, devices or [None] * len(balance), {})


def run(stages: Sequence[Stage], x: torch.Tensor, chunks: int, checkpointed: int, lookahead: int, threads: bool) -> Any:
    """The output of a mini-batch."""
    micro_batches = scatter((x,), {}, chunks)
    outputs = run_pipeline(stages, micro_batches, Regions(lambda _, i: i < checkpointed), lookahead, threads)
    return gather(outputs, [batch.rows for batch in micro_batches])


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]
