"""Recompute: the autograd Function whose backward is the replay of a frame."""
from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from torchckpt.kernel.frame import Frame

__all__ = ["Recompute", "recompute"]


class Recompute(Function):
    """From phonies to a phony. Where it stands in the graph is when the frame is recomputed, at the latest."""

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


def recompute(frame: Frame, *phonies: Tensor) -> Tensor:
    """A phony that hangs on ``phonies``, with the replay of ``frame`` between them in the backward."""
    edge: Tensor = Recompute.apply(frame, *phonies)  # type: ignore[no-untyped-call]  # Function.apply is untyped in torch
    return edge
