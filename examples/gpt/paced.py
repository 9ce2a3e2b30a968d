"""Paced: blocks that sleep, so that processes which share a few cores take the time that devices of their own would."""
from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

__all__ = ["Paced"]


class Paced(nn.Module):
    """``block``, whose forward ends after ``seconds`` and whose backward after twice that::

        x -> [Begin] -> block -> [End] -> y

    Forward: Begin looks at the clock, End sleeps. Backward: End looks at the clock, once what it saved is recomputed;
    Begin sleeps. End saves its input, so that a replay sleeps, too.
    """

    def __init__(self, block: nn.Module, seconds: float) -> None:
        super().__init__()
        self.block, self.seconds = block, seconds

    def forward(self, x: Tensor) -> Tensor:
        pace = _Pace(self.seconds)
        y: Tensor = _End.apply(self.block(_Begin.apply(x, pace)), pace)
        return y


@dataclass
class _Pace:
    seconds: float
    began: float = 0.0

    def begin(self) -> None:
        self.began = time.perf_counter()

    def sleep(self, seconds: float) -> None:
        while (left := self.began + seconds - time.perf_counter()) > 0:
            time.sleep(left)


class _Begin(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pace: _Pace) -> Tensor:
        ctx.pace = pace
        pace.begin()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.pace.sleep(2 * ctx.pace.seconds)
        return grad, None


class _End(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pace: _Pace) -> Tensor:
        ctx.pace = pace
        ctx.save_for_backward(x)
        pace.sleep(pace.seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.saved_tensors  # noqa: B018  # recomputes it
        ctx.pace.begin()
        return grad, None
