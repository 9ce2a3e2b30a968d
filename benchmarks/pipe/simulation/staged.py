"""Staged: a GPT with one stage for each simulated device, and the compared ways to train it."""
from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pipe.large import gpt
from benchmarks.pipe.simulation.observed import Marked
from benchmarks.pipe.variants import Job, Region
from torchckpt import Pipe
from torchckpt.planning import Schedule, ahead, arrival, exempt, gpipe, none, one_f_one_b, with_recompute
from torchckpt.planning.work.choice import Choices

__all__ = ["BOUNDARY_BYTES", "VARIANTS", "Variant", "called", "marked", "on_paper", "schedule_of", "staged", "stepper"]


@dataclass(frozen=True)
class Variant:
    """One way to train the pipeline."""

    name: str
    base: str = "GPipe"  # one backward through one graph; or 1F1B: Pipe.step()
    mode: Any = "always"
    lookahead: int = 1
    regions: str = ""  # inside of the stages, recomputed late: stock or ours

    @property
    def region(self) -> str:
        """What each stage is on a micro-batch: stock, ours, or nothing."""
        return self.regions or ("" if self.mode == "never" else "ours")


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
    """What each device does in order. A replay inside a backward has an ``R`` there, too."""
    plain = _plain(variant, stages, m)
    if variant.regions:
        return with_recompute(plain, ahead(plain))
    return with_recompute(plain, _choices(variant, plain), variant.lookahead)


def on_paper(variant: Variant, stages: int, m: int) -> tuple[Schedule, Choices]:
    """The variant's schedule and choices, for the simulator."""
    if variant.regions:
        plain = _plain(variant, stages, m)
        return plain, arrival(plain)
    schedule = schedule_of(variant, stages, m)
    return schedule, _choices(variant, schedule)


def _plain(variant: Variant, stages: int, m: int) -> Schedule:
    return one_f_one_b(stages, m) if variant.base == "1F1B" else gpipe(stages, m, last_first=True)


def _choices(variant: Variant, schedule: Schedule) -> Choices:
    if variant.mode == "never":
        return none(schedule)
    if variant.base == "1F1B":
        return exempt(schedule, ahead(schedule), "last_stage")
    kept = {"always": [], "except_last": ["last_micro_batch"]}[variant.mode]
    return exempt(schedule, ahead(schedule), *kept)


LENGTH, WIDTH, HEADS, VOCABULARY = 16, 32, 2, 32
BOUNDARY_BYTES = LENGTH * WIDTH * 4
"""Bytes of the tensor that one stage sends to the next for one micro-batch of one row."""


def staged(stages: int, m: int, blocks: int = 8) -> Job:
    """A GPT of ``blocks``, small in each length (see ``machines.py``): a Sequential of its stages, and ``m`` rows."""
    job = gpt("cpu", m, LENGTH, WIDTH, HEADS, blocks, VOCABULARY, torch.float32)
    first, *inner, last = job.model
    each = blocks // stages
    parts = [inner[start : start + each] for start in range(0, blocks, each)]
    parts[0].insert(0, first)
    parts[-1].append(last)
    return Job(nn.Sequential(*(nn.Sequential(*part) for part in parts)), job.x, job.target, job.loss)


def called(stage: nn.Module, region: str, x: Tensor) -> Tensor:
    """``stage`` on ``x``, as a region or plainly."""
    output: Tensor = Region(nn.Sequential(stage), stock=region == "stock")(x) if region else stage(x)
    return output


def marked(model: nn.Sequential) -> nn.Sequential:
    """A copy of the model whose stages mark when they begin."""
    return nn.Sequential(*(Marked(stage) for stage in copy.deepcopy(model)))


def stepper(job: Job, variant: Variant, m: int, is_marked: bool = True) -> Callable[[], Tensor]:
    """A training step of a pipeline with one stage on each device: forward and backward of the mini-batch.

    Args:
        is_marked: whether the stages say when they begin, for ``timeline_of``.
    """
    stages = list(marked(job.model) if is_marked else copy.deepcopy(job.model))
    if variant.regions:
        stages = [Region(nn.Sequential(stage), stock=variant.regions == "stock") for stage in stages]
    devices = [f"sim:{stage}" for stage in range(len(stages))]
    pipe = Pipe(nn.Sequential(*stages), [1] * len(stages), devices, m, variant.mode, variant.lookahead)
    x, target = job.x.to(devices[0]), job.target.to(devices[-1])

    def step() -> Tensor:
        if variant.base == "1F1B":
            return pipe.step(x, target, loss_fn=job.loss)
        loss = job.loss(pipe(x), target)
        loss.backward()
        return loss.detach()

    return step
