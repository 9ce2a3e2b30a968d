"""Variants: one Sequential, trained plainly, with torch's checkpointing, and in pipelines."""
from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as stock_checkpoint

import torchckpt
from torchckpt import Pipe
from torchckpt.typing import CheckpointMode

__all__ = [
    "Job",
    "Variant",
    "accumulated",
    "late_pipe_of",
    "of_pipe",
    "of_step",
    "pipe_of",
    "variants",
    "whole",
]

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
MODES: tuple[CheckpointMode, ...] = ("never", "except_last", "always")


@dataclass(frozen=True)
class Job:
    """A model, and a mini-batch for it."""

    model: nn.Sequential
    x: Tensor
    target: Tensor
    loss: Loss

    def copied(self) -> nn.Sequential:
        """A copy of the model with the same weights, on the device of the mini-batch."""
        return copy.deepcopy(self.model).to(self.x.device)


@dataclass
class Variant:
    """One way to train the job's model: each has its own copy, with the same weights."""

    name: str
    module: nn.Module
    forward: Callable[[], Tensor] | None
    """Runs the forward and returns the loss. None if the variant has only ``both``, forward and backward in one."""
    both: Callable[[], Tensor] = field(default=lambda: torch.empty(0))

    def step(self) -> Tensor:
        """Run a forward and a backward, after dropping the gradients of the last step."""
        self.forget()
        if self.forward is None:
            return self.both()
        loss = self.forward()
        loss.backward()
        return loss.detach()

    def forget(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]


class Region(nn.Module):
    """Layers as one checkpointed region, recomputed late: when their gradient arrives."""

    def __init__(self, layers: nn.Sequential, stock: bool) -> None:
        super().__init__()
        self.layers, self.stock = layers, stock

    def forward(self, x: Tensor) -> Tensor:
        if self.stock:
            return stock_checkpoint(self.layers, x, use_reentrant=False)  # type: ignore[no-any-return]  # torch's
        return torchckpt.checkpoint(self.layers, x)  # type: ignore[no-any-return]


def variants(job: Job, balance: Sequence[int], m: int) -> list[Variant]:
    """All variants on the CPU, the plain one first."""
    return [
        plain(job, m),
        accumulated(job, m),
        whole(job),
        stock(job, balance, m),
        *(of_pipe(f"Pipe, {mode}", job, pipe_of(job, balance, m, mode)) for mode in MODES),
        *(of_step(f"Pipe.step, {mode}", job, pipe_of(job, balance, m, mode)) for mode in ("never", "always")),
    ]


def plain(job: Job, m: int, name: str = "plain") -> Variant:
    """The model on one micro-batch after the other, in one graph: computes like a pipeline, in the same order."""
    model = job.copied()
    return _micro_batched(name, job, model, m)


def accumulated(job: Job, m: int, name: str = "plain, accumulated") -> Variant:
    """A forward and a backward for each micro-batch in turn: computes like ``Pipe.step``, in the same order."""
    model = job.copied()
    micro_batches = list(zip(job.x.tensor_split(m), job.target.tensor_split(m)))

    def both() -> Tensor:
        losses = []
        for x, target in micro_batches:
            loss = job.loss(model(x), target) * (len(x) / len(job.x))
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    return Variant(name, model, None, both)


def whole(job: Job, name: str = "plain, one batch") -> Variant:
    model = job.copied()
    return Variant(name, model, lambda: job.loss(model(job.x), job.target))


def stock(job: Job, balance: Sequence[int], m: int, name: str = "torch.utils.checkpoint") -> Variant:
    """One checkpointed region for each stage and micro-batch, as in a pipeline."""
    return _micro_batched(name, job, regions(job.copied(), balance, stock=True), m)


def regions(model: nn.Sequential, balance: Sequence[int], stock: bool) -> nn.Sequential:
    ends = [sum(balance[: stage + 1]) for stage in range(len(balance))]
    return nn.Sequential(*(Region(model[end - count : end], stock) for end, count in zip(ends, balance)))


def pipe_of(
    job: Job, balance: Sequence[int], m: int, mode: CheckpointMode, devices: Sequence[str] | None = None
) -> Pipe:
    return Pipe(job.copied(), balance, devices, chunks=m, checkpoint=mode)


def late_pipe_of(
    job: Job, balance: Sequence[int], m: int, stock: bool = False, devices: Sequence[str] | None = None
) -> Pipe:
    """A pipeline without its own recomputation, whose stages are regions that are recomputed late."""
    model = regions(job.copied(), balance, stock)
    return Pipe(model, [1] * len(balance), devices, chunks=m, checkpoint="never")


def of_pipe(name: str, job: Job, pipe: Pipe) -> Variant:
    def forward() -> Tensor:
        output = pipe(job.x)
        return job.loss(output, job.target.to(output.device))

    return Variant(name, pipe, forward)


def of_step(name: str, job: Job, pipe: Pipe) -> Variant:
    """1F1B, forwards and backwards in turn."""

    def both() -> Tensor:
        loss: Tensor = pipe.step(job.x, job.target, loss_fn=job.loss)
        return loss

    return Variant(name, pipe, None, both)


def _micro_batched(name: str, job: Job, model: nn.Module, m: int) -> Variant:
    def forward() -> Tensor:
        return job.loss(torch.cat([model(one) for one in job.x.tensor_split(m)]), job.target)

    return Variant(name, model, forward)
