"""Traced: a function of tensors as a module, and what the graph level made of one call of it."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torchckpt import graph
from torchckpt.graph.run.rematerialize import Rematerialized
from torchckpt.graph.step.joint import Joint
from torchckpt.planning.remat.plan import Plan

__all__ = ["Function", "joint_of", "plan_of"]


class Function(nn.Module):
    """Of positional tensors, and of keywords."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor, **named: Any) -> Any:
        return self.function(*inputs, **named)


def plan_of(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> Plan:
    """Of a module's call, or a function's, on these inputs."""
    return traced(function, *inputs, **options).plan


def joint_of(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> Joint:
    (call,) = traced(function, *inputs, **options)._calls.known.values()
    return call.halves.joint


def traced(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> Rematerialized:
    model = function if isinstance(function, nn.Module) else Function(function)
    return graph.rematerialize(model, *inputs, **options)
