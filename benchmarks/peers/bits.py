"""Bits: all that a few steps of training leave, plainly and with regions, compared to the bit."""
from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import torchckpt

__all__ = ["KINDS", "WAYS", "Left", "differing", "train"]

KINDS = ("losses", "gradients", "parameters", "buffers", "random state", "predictions")

WAYS: dict[str, Callable[..., Any]] = {
    "torch.utils.checkpoint": torch.utils.checkpoint.checkpoint,
    "torchckpt": torchckpt.checkpoint,
}


class Left(NamedTuple):
    """What training leaves, by kind, and how often a region was made."""

    values: dict[str, list[Tensor | None]]
    regions: int


def train(build: Callable[[], tuple[nn.Module, Tensor]], way: Callable[..., Any] | None, steps: int) -> Left:
    """Build a model and train it, from one seed.

    Args:
        build: a model, with checkpointing on or off, and its input.
        way: stands in for torch's ``checkpoint``; None for a model that makes no regions.
    """
    torch.manual_seed(0)
    random.seed(0)
    model, x = build()
    replaced = mock.Mock(side_effect=way or torch.utils.checkpoint.checkpoint)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    losses: list[Tensor | None] = []
    with mock.patch.object(torch.utils.checkpoint, "checkpoint", lambda *args, **named: replaced(*args, **named)):
        for _ in range(steps):
            optimizer.zero_grad()
            loss = _first(model.train()(x)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    values = {
        "losses": losses,
        "gradients": [parameter.grad for parameter in model.parameters()],
        "parameters": [*model.parameters()],
        "buffers": [*model.buffers()],
        "random state": [torch.get_rng_state(), torch.tensor(random.getstate()[1])],
    }
    with torch.no_grad():
        values["predictions"] = [_first(model.eval()(x))]
    return Left(values, replaced.call_count)


def differing(left: Left, other: Left) -> list[str]:
    """The kinds of which some tensor has other bits."""
    return [kind for kind in KINDS if not _same(left.values[kind], other.values[kind])]


def _same(left: Iterable[Tensor | None], other: Iterable[Tensor | None]) -> bool:
    pairs = [(a, b) for a, b in zip(left, other, strict=True) if a is not None or b is not None]
    return all(a is not None and b is not None and torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def _bits(tensor: Tensor) -> Tensor:
    """So that a NaN equals itself, and zeros of two signs differ."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]
