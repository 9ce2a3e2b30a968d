"""Model: a builder of a module that returns a loss, and of its inputs, by a name."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["UNTUNED", "Loss", "build", "model"]

UNTUNED: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {}


class Loss(nn.Module):
    """``forward(self, *inputs)`` of a subclass calls ``self.loss(outputs...)``."""

    def loss(self, *outputs: Tensor) -> Tensor:
        real = [torch.view_as_real(output) if output.is_complex() else output for output in outputs]
        return sum(output.double().sin().mean() for output in real)


def model(*shapes: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Enter a module, with its inputs: a shape is of normal numbers, a function draws others."""

    def enter(kind: type[nn.Module]) -> type[nn.Module]:
        UNTUNED[kind.__name__] = lambda: build(kind, shapes)
        return kind

    return enter


def build(kind: type[nn.Module], shapes: tuple[Any, ...]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = kind().train()
        return module, tuple(torch.randn(shape) if isinstance(shape, tuple) else shape() for shape in shapes)
