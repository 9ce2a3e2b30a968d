"""Recompute: the autograd Function whose backward is the replay of a frame."""
from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from torchckpt.regions.core.frame import Frame
from torchckpt.regions.private import apply_of

__all__ = ["Recompute", "recompute"]


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


_apply = apply_of(Recompute)


def recompute(frame: Frame, *phonies: Tensor) -> Tensor:
    """A phony that depends on ``phonies``. The backward between them is the replay of ``frame``."""
    edge: Tensor = _apply(frame, *phonies)
    return edge
