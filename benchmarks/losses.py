"""Losses: the loss functions of the benchmarks."""
from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy

__all__ = ["mean_square", "next_token"]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def next_token(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), target.flatten())
