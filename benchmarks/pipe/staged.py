"""Staged: a GPT in as many stages as there are simulated devices, and the ways to train it that are compared."""
from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from large import gpt
from observed import Marked
from torch import Tensor, nn
from variants import Job, Region

from torchckpt import Pipe
from torchckpt.model import Schedule, ahead, arrival, gpipe, one_f_one_b, with_recompute

__all__ = ["VARIANTS", "Cell", "Variant", "schedule_of", "stepper"]


@dataclass(frozen=True)
class Variant:
    """A way to train."""

    name: str
    base: str = "GPipe"  # one backward through one graph; or 1F1B: Pipe.step()
    mode: Any = "always"
    lookahead: int = 1
    regions: str = ""  # inside of the stages, recomputed late: stock or ours


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("GPipe, none", mode="never"),
        Variant("GPipe, torch.utils.checkpoint", mode="never", regions="stock"),
        Variant("GPipe, Pipe late", mode="never", regions="ours"),
        Variant("GPipe, Pipe early", lookahead=1),
        Variant("GPipe, Pipe early, look-ahead 2", lookahead=2),
        Variant("GPipe, Pipe early, except_last", mode="except_last"),
        Variant("1F1B, none", "1F1B", mode="never"),
        Variant("1F1B, torch.utils.checkpoint", "1F1B", mode="never", regions="stock"),
        Variant("1F1B, Pipe.step() late", "1F1B", mode="never", regions="ours"),
        Variant("1F1B, Pipe.step() early", "1F1B"),
    )
}


def schedule_of(variant: Variant, stages: int, m: int) -> Schedule:
    """What the variant does, on paper."""
    plain = one_f_one_b(stages, m) if variant.base == "1F1B" else gpipe(stages, m, last_first=True)
    if variant.regions:
        return with_recompute(plain, arrival())
    if variant.mode == "never":
        return plain
    kept = {"always": (), "except_last": "last_micro_batch"}[variant.mode]
    return with_recompute(plain, ahead(variant.lookahead, exempt="last_stage" if variant.base == "1F1B" else kept))


@dataclass(frozen=True)
class Cell:
    """A GPT, each stage ``blocks`` of it; small in each length: see ``machines.py``."""

    stages: int
    m: int
    blocks: int = 1
    length: int = 16
    width: int = 32
    vocabulary: int = 32

    def job(self) -> Job:
        """One row a micro-batch; the model has a layer for each stage."""
        job = gpt(
            "cpu", self.m, self.length, self.width, 2, self.stages * self.blocks, self.vocabulary, torch.float32
        )
        first, *blocks, last = job.model
        parts = [blocks[start : start + self.blocks] for start in range(0, len(blocks), self.blocks)]
        parts[0].insert(0, first)
        parts[-1].append(last)
        return Job(nn.Sequential(*(nn.Sequential(*part) for part in parts)), job.x, job.target, job.loss)


def stepper(job: Job, variant: Variant, m: int, marked: bool = True) -> tuple[Pipe, Callable[[], Tensor]]:
    """The pipeline, a stage on each device, and a step of it: a forward and a backward of the mini-batch.

    Args:
        marked: whether the stages say when they begin, for ``timeline_of``.
    """
    stages = [Marked(stage) if marked else stage for stage in copy.deepcopy(job.model)]
    if variant.regions:
        stages = [Region(nn.Sequential(stage), stock=variant.regions == "stock") for stage in stages]
    devices = [f"sim:{stage}" for stage in range(len(stages))]
    pipe = Pipe(nn.Sequential(*stages), [1] * len(stages), devices, m, variant.mode, variant.lookahead)
    x, target = job.x.to(devices[0]), job.target.to(devices[-1])
    torch.sim.synchronize()

    def step() -> Tensor:
        if variant.base == "1F1B":
            return pipe.step(x, target, loss_fn=job.loss)
        loss = job.loss(pipe(x), target)
        loss.backward()
        return loss.detach()

    return pipe, step
