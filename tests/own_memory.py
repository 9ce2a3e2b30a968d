"""Blocks that save little, and whose own backward takes much memory; and one that does not."""
from __future__ import annotations

from torch import nn
from torch.nn.functional import gelu

from torchckpt import checkpoint

__all__ = ["Nested", "Plain", "Spread"]


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
