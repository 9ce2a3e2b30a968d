"""Halves: blocks in half precision, which save a copy of their input in its place."""
from __future__ import annotations

from torch import nn

__all__ = ["ROWS", "SIZE", "Half", "Rows", "wide"]

SIZE, ROWS = 32, 256


class Half(nn.Module):
    """Of its input in half precision it saves a copy in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, width), nn.Linear(width, SIZE)

    def forward(self, x):
        normed = x.float() * x.float().square().mean(-1, keepdim=True).add(1e-5).rsqrt()
        return x + self.down(self.up(normed.to(x.dtype)).relu())


class Rows(nn.Module):
    """Layers in a row, between which ``between`` runs, if there is one.

    Args:
        holds: whether inputs of layers are held by the forward, and added to what the last one returns.
    """

    def __init__(self, widths, between=None, holds: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.layers = nn.ModuleList(map(Half, widths))
        self.between, self.holds = between, holds

    def forward(self, x):
        x, held = self.first(x), []
        for layer in self.layers:
            if self.holds:
                held.append(x)
            y = layer(x)
            if self.between is not None:
                y = self.between(y)
            x = y
        for each in held:
            x = x + each
        return x


def wide(x):
    """Takes more than it leaves."""
    return (x.repeat(8, 1).sum() * 0).detach() + x
