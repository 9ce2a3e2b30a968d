"""Block: a stage that sleeps for a set time, so that processes which share a few cores behave as separate devices."""
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
    """Make this thread's sleeps more exact: they end some 30 us late, not 100, since Linux no longer groups wake-ups.
    One exact sleep costs a fourth of the processor time of a long sleep with several short ones after it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NANOSECONDS, 0, 0, 0)


def sleep_until(moment: float) -> None:
    """Of ``time.perf_counter``. Nothing spins: others need the core."""
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


@dataclass(frozen=True)
class Costs:
    """Seconds of a stage's forward and backward, and of a message. A recompute runs a forward, and takes as long."""

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
        self.anchor = nn.Parameter(torch.zeros(()))  # gives Begin a backward even if the input needs no gradient
        self.recomputes: list[tuple[float, float]] = []
        """Start and end of each replay by torchckpt."""

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
