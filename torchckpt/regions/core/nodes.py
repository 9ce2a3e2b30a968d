"""Nodes: the autograd Functions of a region, [1], [4], [5] and [8] in the drawing of ``regions/__init__.py``.

``Fork`` and ``Join`` make an edge between two nodes of the graph that share no data: a phony goes from the fork through
other nodes to the join. In the backward the join runs first, then the nodes on the phony's way, then the fork. So
nothing before the fork runs backward until all nodes on the phony's way have run.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from torchckpt.regions.core.frame import Frame
from torchckpt.regions.private import apply_of
from torchckpt.tensors import detached

__all__ = ["Checkpoint", "Recompute", "changed", "checkpoint", "fork", "join", "phony", "recompute"]


class Checkpoint(Function):
    """Maps an input of a region, and phonies, to the tensor that the region's function gets for that input.

    Its node is the last of the region's backward for that input: it runs when the gradient of the input is computed. It
    moves the recomputed tensors from the frame into their slots: if no unpack has done so, the frame would hold them
    all. After it the nodes that made the phonies may run, such as the next replay of a lane (``pipe/run/pipeline.py``).
    """

    @staticmethod
    def forward(ctx: Any, frame: Frame, input: Tensor, *phonies: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        # Weak: a function that stores its input would hold the frame, which holds the function.
        ctx.frame, ctx.edges = weakref.ref(frame), len(phonies)
        return detached(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        frame = ctx.frame()
        if frame is not None:
            frame.fill_slots()
        return None, grad, *(None,) * ctx.edges


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


class Changed(Function):
    """An in-place operation on ``input``, whose values an alias of it has already. It continues the alias's graph."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, alias: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(input)
        ctx.is_view = input._is_view()
        return input

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        # Without zeros for a view, autograd drops the gradient of its base, with that of the elements beside the view.
        return torch.zeros_like(grad) if ctx.is_view and grad is not None else None, grad


changed: Callable[..., Tensor] = apply_of(Changed)
"""``changed(input, alias)``: note in the graph of ``input`` what was changed in place by way of ``alias``."""
checkpoint: Callable[..., Tensor] = apply_of(Checkpoint)
"""``checkpoint(frame, input, *phonies)``: the tensor that the function of ``frame`` gets for ``input``, which must
require grad. Its backward runs before the backward of ``phonies``.

Call it once for each input. With a common node, the loss of an output that needs one input would also run the backward
of what produced the other inputs.
"""
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
