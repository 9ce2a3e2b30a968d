"""Models of unlike layers, and steps of them beside those of the plain model."""
from __future__ import annotations

import copy
import random

import torch
from torch import nn

__all__ = ["Attention", "Model", "Wide", "gradients", "plain_gradients", "random_model"]


class Wide(nn.Module):
    """A residual block of its own width, with dropout."""

    def __init__(self, size: int, width: int, depth: int = 1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        inner = [nn.Linear(width, width) for _ in range(depth - 1)]
        self.parts = nn.Sequential(nn.Linear(size, width), nn.GELU(), nn.Dropout(0.2), *inner, nn.Linear(width, size))

    def forward(self, x):
        return x + self.parts(self.norm(x))


class Attention(nn.Module):
    """A block whose bytes grow with the square of the length."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)


class Model(nn.Module):
    """An input layer, blocks, and a head."""

    def __init__(self, blocks, size: int = 16, head: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(size, size)
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(size, head)

    def forward(self, x):
        x = self.first(x).tanh()
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def random_model(seed: int, layers: int = 6, size: int = 16) -> Model:
    chosen = random.Random(seed)
    blocks = [Wide(size, size * chosen.randint(1, 8), chosen.randint(1, 3)) for _ in range(chosen.randint(2, layers))]
    return Model(blocks, size, chosen.choice((4, 64, 256)))


def gradients(model: nn.Module, *inputs, seed: int = 1):
    """The gradients of one step, forward and backward; the model has none afterwards."""
    torch.manual_seed(seed)
    loss = sum(model(x).square().mean() for x in inputs)
    loss.backward()
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def plain_gradients(model: nn.Module, *inputs, seed: int = 1):
    """Those of a copy of the model, whose layers are plain."""
    return gradients(copy.deepcopy(model), *inputs, seed=seed)
