"""Modules to checkpoint, and one step through them from a fixed seed."""
from __future__ import annotations

import torch
from torch import nn

from torchckpt import checkpoint_module
from torchckpt.testing import count_recomputes


class Block(nn.Module):
    """A block."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(size, size), nn.LayerNorm(size)
        self.register_buffer("factor", torch.full((), 2.0))

    def forward(self, input: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Its forward."""
        return nn.functional.dropout(self.norm(self.linear(input)).sin() * scale * self.factor, 0.5).exp()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x)


def checkpointed(module, **options):
    checkpoint_module(module, **options)
    return module


def step(module, x=None, **kwargs):
    """Output and gradients of one step from a fixed seed, and how often regions were replayed for it."""
    torch.manual_seed(1)
    x = torch.linspace(0, 1, 12).reshape(3, 4).requires_grad_() if x is None else x
    with count_recomputes() as recomputes:
        output = module(x, **kwargs)
        gradients = torch.autograd.grad(output.sin().sum(), [x, *module.parameters()])
    return [output.detach(), *gradients], recomputes.total


def assert_recomputes_to_equal(module, expected, total=1):
    tensors, recomputes = step(module)
    assert all(map(torch.equal, tensors, expected))
    assert recomputes == total
