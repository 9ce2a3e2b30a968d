"""Load: blocks that take a set time and save set bytes, with a weight gradient that can be split off."""
from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from benchmarks.pipeline.sleeping.block import sleep_until

__all__ = ["ROW", "Embedding", "Load", "Loaded"]

ROW = 1500
"""Numbers in one row of an activation."""


@dataclass(frozen=True)
class Load:
    """Seconds and bytes of one block. A recompute runs a forward, and takes as long."""

    forward_seconds: float
    input_grad_seconds: float
    weight_grad_seconds: float
    saved_bytes: int
    """Bytes that a block saves, beside its input and the mask of its dropout."""


class Loaded(nn.Module):
    """A small computation with dropout, in ``load``::

        x -> [Begin] -> x + dropout(x * [Weight] weight) -> [End] -> y

    Forward: Begin looks at the clock, End sleeps. Backward: End takes what it saved, and so has it recomputed; Begin
    sleeps for the gradient of the input, Weight for that of the weight.
    """

    def __init__(self, load: Load) -> None:
        super().__init__()
        self.load = load
        self.weight = nn.Parameter(torch.randn(ROW) / 8)

    def forward(self, x: Tensor) -> Tensor:
        watch = _Watch(self.load)
        x = _Begin.apply(x, watch)
        y = x + nn.functional.dropout(x * _Weight.apply(self.weight, watch), 0.1, self.training)
        held = torch.empty(self.load.saved_bytes, dtype=torch.uint8)
        out: Tensor = _End.apply(y, held, watch)
        return out


class Embedding(nn.Module):
    """The embedding of the first stage, which is never recomputed."""

    def __init__(self, forward_seconds: float) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(ROW))
        self.forward_seconds = forward_seconds

    def forward(self, x: Tensor) -> Tensor:
        sleep_until(time.perf_counter() + self.forward_seconds)
        return x + self.shift


class _Watch:
    def __init__(self, load: Load) -> None:
        self.load = load
        self.began = 0.0


class _Begin(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, watch: _Watch) -> Tensor:
        ctx.watch, watch.began = watch, time.perf_counter()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sleep_until(time.perf_counter() + ctx.watch.load.input_grad_seconds)
        return grad, None


class _Weight(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, watch: _Watch) -> Tensor:
        ctx.watch = watch
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sleep_until(time.perf_counter() + ctx.watch.load.weight_grad_seconds)
        return grad, None


class _End(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, held: Tensor, watch: _Watch) -> Tensor:
        ctx.save_for_backward(held)
        sleep_until(watch.began + watch.load.forward_seconds)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018  # recomputes it
        return grad, None, None
