"""A case: a model, what it is called with, and a loss. All of it follows from a seed."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["MODELS", "Case", "Draw", "Loss", "Parts", "case", "classify", "itself"]

Draw = Callable[[], tuple[Tensor, ...]]
"""Draws inputs from the global generator."""

Loss = Callable[[Any], Tensor]
"""A scalar of a model's outputs."""

Parts = tuple[nn.Module, Draw, Loss]
"""What the builder of a case returns."""


@dataclass(frozen=True)
class Case:
    """A model in training mode with random weights, a way to draw its inputs, and a loss of its outputs."""

    name: str
    model: nn.Module
    make_inputs: Callable[[int], tuple[Tensor, ...]]
    loss: Loss

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.make_inputs(0)

    def backward(self, *inputs: Tensor) -> None:
        """A forward and its backward, in eager; nothing but gradients stays."""
        self.loss(self.model(*(inputs or self.inputs))).backward()


MODELS: dict[str, Callable[..., Case]] = {}
"""Builders of cases: ``MODELS[name](seed=0, device="cpu", **sizes)``. The sizes are small unless told."""


def case(name: str, **fixed: Any) -> Callable[[Callable[..., Parts]], Callable[..., Parts]]:
    """Enter a builder, with some of its sizes fixed. The global generator stays where it is."""

    def enter(builder: Callable[..., Parts]) -> Callable[..., Parts]:
        @wraps(builder)
        def build(seed: int = 0, device: str = "cpu", **sizes: Any) -> Case:
            model, draw, loss = _from_seed(seed, lambda: builder(**{**fixed, **sizes}))

            def make_inputs(seed: int) -> tuple[Tensor, ...]:
                return pytree.tree_map(lambda tensor: _moved(tensor, device), _from_seed(seed, draw))

            return Case(name, model.train().to(device), make_inputs, loss)

        MODELS[name] = build
        return builder

    return enter


def itself(loss: Tensor) -> Tensor:
    """The loss of a model that returns it."""
    return loss


def classify(logits: Tensor) -> Tensor:
    """Cross entropy over dimension 1, of targets that count the rows (and pixels) modulo the number of classes."""
    rows, classes, *pixels = logits.shape
    targets = torch.arange(logits.numel() // classes, device=logits.device) % classes
    return nn.functional.cross_entropy(logits, targets.view(rows, *pixels))


def _from_seed(seed: int, draw: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return draw()


def _moved(tensor: Tensor, device: str) -> Tensor:
    return tensor.detach().clone().to(device).requires_grad_(tensor.requires_grad)
