"""Fork and join, [4] and [8] in the drawing of a region: an edge between two nodes of the graph that share no data.

A phony goes from ``fork`` through other nodes to ``join``. In the backward ``join`` runs first, then the nodes on the
phony's way, then ``fork``. So nothing before the fork runs backward until all nodes on the phony's way have run.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from torchckpt.regions.private import apply_of

__all__ = ["fork", "join", "phony"]

def phony(device: torch.device) -> Tensor:
    """Make a phony on ``device``. Autograd runs the node that returns it in the thread of that device.

    Phonies are not cached: a phony made under a tensor mode or on a side stream must not be used after it.
    """
    return torch.empty(0, device=device)


class Fork(Function):
    # The gradient of a phony stays undefined (None): no zeros are made, and the engine synchronises no streams for it.
    @staticmethod
    def forward(ctx: Any, input: Tensor, *phonies: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.phonies = len(phonies)
        # detach(): if the Function returned the input itself, autograd would forbid in-place operations on the output.
        return input.detach(), phony(input.device).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        return grad, *(None,) * ctx.phonies


class Join(Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, *phonies: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.phonies = len(phonies)
        return input.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        return grad, *(None,) * ctx.phonies


_fork, _join = apply_of(Fork), apply_of(Join)


def fork(input: Tensor, *phonies: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``input``, as a new tensor, and a phony that depends on it. ``input`` must require grad.

    ``phonies``, if given, are joined to ``input`` in the same node, as by :func:`join`.
    """
    output, edge = _fork(input, *phonies)
    return output, edge


def join(input: Tensor, *phonies: Tensor) -> Tensor:
    """Return ``input`` as a new tensor, whose backward runs before the backward of each of ``phonies``."""
    output: Tensor = _join(input, *phonies)
    return output
