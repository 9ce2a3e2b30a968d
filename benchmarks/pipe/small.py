"""Small: a transformer stack and a conv net for a CPU, of eight equal blocks, each with a mini-batch."""
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.pipe.variants import Job
from benchmarks.transformer import Block, written_out

__all__ = ["JOBS", "conv_net", "transformer_stack"]

BLOCKS = 8


class Convolution(nn.Module):
    """Two convolutions, each before a GroupNorm, with a residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (x + self.second(self.first(x))).relu()
        return y


def transformer_stack(rows: int = 16, length: int = 32, width: int = 64) -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width, 4, written_out) for _ in range(BLOCKS)))
    return Job(model, *torch.randn(2, rows, length, width), mse_loss)


def conv_net(rows: int = 16, channels: int = 16, side: int = 16) -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(*(Convolution(channels) for _ in range(BLOCKS)))
    return Job(model, *torch.randn(2, rows, channels, side, side), mse_loss)


JOBS = {"transformer stack": transformer_stack, "conv net": conv_net}
