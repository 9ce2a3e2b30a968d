"""Block: a stage that takes a set time, so that processes which share a few cores behave as devices of their own."""
from __future__ import annotations

import ctypes
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

import torchckpt

__all__ = ["Block", "Costs", "sleep_precisely", "sleep_until"]

_PR_SET_TIMERSLACK, _SLACK_NANOSECONDS = 29, 1000


def sleep_precisely() -> None:
    """From here on, sleeps of this thread end some 30 us late, not 100: Linux no longer waits to wake several at once.
    To sleep in one go costs a fourth of the processor's time of a long sleep and some short ones."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NANOSECONDS, 0, 0, 0)


def sleep_until(moment: float) -> None:
    """Of ``time.perf_counter``. Nothing spins: others need the core."""
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


@dataclass(frozen=True)
class Costs:
    """What a stage, and a message, take. A recompute takes as long as a forward, which it is."""

    forward_seconds: float
    backward_seconds: float
    link_seconds: float = 0.0


class Block(nn.Module):
    """A small computation with dropout that ends no sooner than after ``costs``, forward and backward::

        x -> [Begin] -> Linear, Dropout, + -> [End] -> y

    Forward: Begin looks at the clock, End sleeps. Backward: End looks at the clock, when what it saved is there, and so
    after a recompute; Begin sleeps. End saves its input: a replay that stops early stops after its sleep.
    """

    def __init__(self, costs: Costs, width: int = 16) -> None:
        super().__init__()
        self.costs = costs
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1))
        self.anchor = nn.Parameter(torch.zeros(()))  # has Begin a backward where the input needs no gradient
        self.recomputes: list[tuple[float, float]] = []
        """When each replay by torchckpt began and ended."""

    def forward(self, x: Tensor) -> Tensor:
        watch = _Watch(self.costs, self.recomputes if torchckpt.is_recomputing() else [])
        x = _Begin.apply(x, self.anchor, watch)
        y: Tensor = _End.apply(x + self.layers(x), watch)
        return y


class _Watch:
    def __init__(self, costs: Costs, spans: list[tuple[float, float]]) -> None:
        self.costs, self.spans = costs, spans
        self.forward_began = self.backward_began = 0.0


class _Begin(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, watch: _Watch) -> Tensor:
        ctx.watch = watch
        watch.forward_began = time.perf_counter()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sleep_until(ctx.watch.backward_began + ctx.watch.costs.backward_seconds)
        return grad, grad.new_zeros(()), None


class _End(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, watch: _Watch) -> Tensor:
        ctx.watch = watch
        ctx.save_for_backward(x)
        sleep_until(watch.forward_began + watch.costs.forward_seconds)
        watch.spans.append((watch.forward_began, time.perf_counter()))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018  # recomputes it
        ctx.watch.backward_began = time.perf_counter()
        return grad, None
