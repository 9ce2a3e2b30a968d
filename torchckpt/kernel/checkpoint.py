"""Checkpoint: the autograd Function at the inputs of a region, where the region's backward ends."""
from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from torchckpt.kernel.frame import Frame
from torchckpt.kernel.private import apply_of

__all__ = ["Checkpoint", "checkpoint", "held_by"]


class Checkpoint(Function):
    """From an input of a region, and phonies, to what the region's function gets for that input.

    In the backward its node is the last of the region: the gradient of the input is made. The frame lets go of what is
    left, and what the phonies hang on may run, such as the replay that comes next in a lane.
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
            frame.let_go()
        return None, grad, *(None,) * ctx.edges


_apply = apply_of(Checkpoint)


def checkpoint(frame: Frame, input: Tensor, *phonies: Tensor) -> Tensor:
    """``input``, which requires grad, as the function of ``frame`` gets it. In the backward ``phonies`` come after it.

    A node for each input: had they one in common, the loss of an output that needs one input would run the backward
    into what the others come from.
    """
    output: Tensor = _apply(frame, input, *phonies)
    return output


def held_by(function: Any) -> Iterator[Tensor]:
    """The tensors that ``function`` has besides its arguments, as far as they are near: in its closure, its defaults, a
    partial, the attributes of its module."""
    if isinstance(function, functools.partial):
        yield from held_by(function.func)
        yield from _tensors([*function.args, *function.keywords.values()])
    elif isinstance(function, MethodType):
        yield from held_by(function.__func__)
        yield from held_by(function.__self__)
    elif isinstance(function, nn.Module):
        for module in function.modules():
            yield from _tensors(vars(module).values())
    elif isinstance(function, FunctionType):
        yield from _tensors([*_contents(function.__closure__ or ()), *(function.__defaults__ or ())])


def _contents(cells: Sequence[Any]) -> Iterator[Any]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:  # nothing is in it yet
            continue


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor))
