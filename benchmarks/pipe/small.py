"""Small: a transformer stack and a conv net for a CPU, of eight equal blocks, each with a mini-batch."""
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss
from variants import Job

__all__ = ["JOBS", "conv_net", "transformer_stack"]

BLOCKS = 8


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm, with residuals."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (query @ key.mT / query.size(-1) ** 0.5).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(gelu(self.up(self.norm_2(x))))
        return y


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
    model = nn.Sequential(*(Block(width, heads=4) for _ in range(BLOCKS)))
    return Job(model, *torch.randn(2, rows, length, width), mse_loss)


def conv_net(rows: int = 16, channels: int = 16, side: int = 16) -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(*(Convolution(channels) for _ in range(BLOCKS)))
    return Job(model, *torch.randn(2, rows, channels, side, side), mse_loss)


JOBS = {"transformer stack": transformer_stack, "conv net": conv_net}
