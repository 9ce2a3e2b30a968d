"""Chain: modules that run one after the other, each on what the one before returns."""
from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["Chain"]


class Chain(nn.Sequential):
    """A tuple or a list that one returns is the arguments of the next, as in a pipeline."""

    def forward(self, *inputs: Any) -> Any:
        outputs: Any = inputs
        for module in self:
            outputs = module(*outputs) if isinstance(outputs, (tuple, list)) else module(outputs)
        return outputs
