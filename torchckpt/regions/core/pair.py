"""Pair: ``Checkpoint`` and ``Recompute``, the autograd Functions [1] and [5] in the drawing of a region."""
from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor
from torch.autograd import Function

from torchckpt.modules import is_module
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.private import apply_of

__all__ = ["Checkpoint", "Recompute", "checkpoint", "held_by", "recompute"]

class Checkpoint(Function):
    """Maps an input of a region, and phonies, to the tensor that the region's function gets for that input.

    Its node is the last of the region's backward: it runs when the gradient of the input is computed. It moves the
    recomputed tensors from the frame into their slots. After it the nodes that made the phonies may run, such as the
    next replay of a lane.
    """

    @staticmethod
    def forward(ctx: Any, frame: Frame, input: Tensor, *phonies: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.frame, ctx.edges = weakref.ref(frame), len(phonies)
        return input.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        frame = ctx.frame()
        if frame is not None:
            frame.fill_slots()
        return None, grad, *(None,) * ctx.edges


_apply_checkpoint = apply_of(Checkpoint)


def checkpoint(frame: Frame, input: Tensor, *phonies: Tensor) -> Tensor:
    """The tensor that the function of ``frame`` gets for ``input``, which must require grad. Its backward runs before
    the backward of ``phonies``.

    Call it once for each input. With a common node, the loss of an output that needs one input would also run the
    backward of what produced the other inputs.
    """
    output: Tensor = _apply_checkpoint(frame, input, *phonies)
    return output


def held_by(function: Any) -> Iterator[Tensor]:
    """The tensors that ``function`` holds besides its arguments: in its closure, its defaults, a partial, or attributes
    of its module. Tensors nested deeper are not found."""
    if isinstance(function, functools.partial):
        yield from held_by(function.func)
        yield from _tensors([*function.args, *function.keywords.values()])
    elif isinstance(function, MethodType):
        yield from held_by(function.__func__)
        yield from held_by(function.__self__)
    elif is_module(function):
        for module in function.modules():
            yield from _tensors(vars(module).values())
    elif isinstance(function, FunctionType):
        yield from _tensors([*_contents(function.__closure__ or ()), *(function.__defaults__ or ())])


def _contents(cells: Sequence[Any]) -> Iterator[Any]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is still empty
            continue


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor))


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


_apply_recompute = apply_of(Recompute)


def recompute(frame: Frame, *phonies: Tensor) -> Tensor:
    """A phony that depends on ``phonies``. The backward between them is the replay of ``frame``."""
    edge: Tensor = _apply_recompute(frame, *phonies)
    return edge
