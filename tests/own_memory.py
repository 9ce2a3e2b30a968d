"""Blocks that save little, and whose own backward, or forward, takes much memory; and one that does not."""
from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import gelu

from torchckpt import checkpoint

__all__ = ["Around", "Nested", "Plain", "Spread", "Summed", "SummedFirst", "SummedLast"]


class Plain(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, 8 * size), nn.Linear(8 * size, size)

    def inner(self, x):
        return self.down(gelu(self.up(x)))

    def forward(self, x):
        return x + self.inner(x)


class Nested(Plain):
    """Saves little, and makes all that it saves in its backward."""

    def forward(self, x):
        return x + checkpoint(self.inner, x)


class Spread(nn.Module):
    """Saves little, and its backward has a large tensor of zeros; its forward has none."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.part = nn.Linear(size, size)

    def forward(self, x):
        return x + self.part(x.expand(48, *x.shape)[0])


class Around(nn.Module):
    """What saves more behind its region than in it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.region, self.second = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x):
        return self.second(self.region(x).tanh()).tanh().sin().exp().tanh()


class Summed(nn.Module):
    """Saves nothing, and its forward takes a large tensor."""

    def __init__(self, size: int) -> None:
        super().__init__()

    def summed(self, x):
        with torch.no_grad():
            return x.repeat(1, 48).exp().sum(1, keepdim=True)

    def forward(self, x):
        return x + self.summed(x)


class SummedFirst(Summed):
    """Saves little, and its forward takes a large tensor before it saves anything."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x):
        more = self.summed(x)
        return self.second(self.first(x).tanh()).tanh() + more


class SummedLast(SummedFirst):
    """The same after it has saved all."""

    def forward(self, x):
        x = self.second(self.first(x).tanh()).tanh() * 1.5
        return x + self.summed(x)
