"""Fork and join: an edge between two nodes of the autograd graph that share no data.

``join`` makes its backward the predecessor, and ``fork`` the successor, of whatever the phony went through between
them: nothing that lies before the fork runs backward until everything on the phony's way has.
"""
from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from torchckpt.kernel.phony import phony
from torchckpt.kernel.private import apply_of

__all__ = ["fork", "join"]


class Fork(Function):
    # The gradient of a phony stays undefined (None): no zeros are made, and the engine synchronises no streams for it.
    @staticmethod
    def forward(ctx: Any, input: Tensor, *phonies: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.phonies = len(phonies)
        # detach(), and not the input itself, so that the output is no view that in-place operations are forbidden on.
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
    """Return ``input`` again, and a phony that hangs on it. ``input`` must require grad.

    With ``phonies`` it is joined first, in the same node.
    """
    output, edge = _fork(input, *phonies)
    return output, edge


def join(input: Tensor, *phonies: Tensor) -> Tensor:
    """Return ``input`` again, whose backward now comes before that of every one of ``phonies``."""
    output: Tensor = _join(input, *phonies)
    return output
