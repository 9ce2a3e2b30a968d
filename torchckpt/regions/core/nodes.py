"""Nodes: the autograd Functions of a region, [4], [5] and [8] in the drawing of ``regions/__init__.py``.

``Fork`` and ``Join`` make an edge between two nodes of the graph that share no data: a phony goes from the fork through
other nodes to the join. In the backward the join runs first, then the nodes on the phony's way, then the fork. So
nothing before the fork runs backward until all nodes on the phony's way have run.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from torchckpt.regions.core.frame import Frame
from torchckpt.regions.private import apply_of
from torchckpt.tensors import detached

__all__ = ["Recompute", "fork", "join", "phony", "recompute"]


class Recompute(Function):
    """Maps phonies to a phony. Its backward replays the frame, unless the frame is recomputed already."""

    @staticmethod
    def forward(ctx: Any, frame: Frame, *phonies: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.frame, ctx.edges = frame, len(phonies)
        return phonies[0].detach()

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[None, ...]:
        ctx.frame.recompute()
        nothing: tuple[None, ...] = (None,) * (1 + ctx.edges)
        return nothing


class Join(Function):
    # The gradient of a phony stays undefined (None): no zeros are made, and the engine synchronises no streams for it.
    @staticmethod
    def forward(ctx: Any, input: Tensor, *phonies: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.edges = len(phonies)
        # detached: autograd would forbid in-place operations on the output if the Function returned the input itself.
        return detached(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        return grad, *(None,) * ctx.edges


class Fork(Join):
    @staticmethod
    def forward(ctx: Any, input: Tensor, *phonies: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.edges = len(phonies)
        return detached(input), phony(input.device).detach()


recompute: Callable[..., Tensor] = apply_of(Recompute)
"""``recompute(frame, *phonies)``: a phony that depends on ``phonies``. The backward between them is the replay."""
fork: Callable[..., tuple[Tensor, Tensor]] = apply_of(Fork)
"""``fork(input, *phonies)``: ``input``, as a new tensor, and a phony that depends on it. ``input`` must require grad.
``phonies``, if given, are joined to it in the same node, as by ``join``."""
join: Callable[..., Tensor] = apply_of(Join)
"""``join(input, *phonies)``: ``input`` as a new tensor, whose backward runs before the backward of ``phonies``."""


def phony(device: torch.device) -> Tensor:
    """Make a phony on ``device``. Autograd runs the node that returns it in the thread of that device.

    Phonies are not cached: a phony made under a tensor mode or on a side stream must not be used after it.
    """
    return torch.empty(0, device=device)
