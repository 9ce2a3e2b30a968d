"""Links: copies of a micro-batch from one place to the next, on copy streams.

``Wait`` and ``Copy`` are autograd Functions. Their backward does the same in the other direction. Each runs on the
stream that is current when it is called, and so does its backward.
"""
from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

from torchckpt.regions.devices import accelerator_type, on
from torchckpt.tensors import detached, of_class

__all__ = ["Place", "copy", "copy_of", "has_strides", "wait"]

_Stream: TypeAlias = torch.Stream | None


class Place(NamedTuple):
    """A device and its compute stream, which is None on a device without streams, such as the CPU."""

    device: torch.device
    compute: _Stream

    @classmethod
    def of(cls, device: torch.device) -> Place:
        """``device`` with its current stream."""
        return cls(device, torch.accelerator.current_stream(device) if device.type == accelerator_type() else None)

    def side_stream(self) -> _Stream:
        return None if self.compute is None else torch.Stream(self.device)


def wait(before: _Stream, after: _Stream, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Make the stream ``after`` wait for ``before``, and return ``tensors`` as new tensors. In the backward, the engine
    makes the readers of their gradients wait for the stream that is current now."""
    return _as_tuple(Wait.apply(before, after, *tensors))  # type: ignore[no-untyped-call]  # Function.apply is untyped


def copy(
    source: Place, source_stream: _Stream, target: Place, target_stream: _Stream, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Copy ``tensors`` to ``target``, on the two streams. The backward copies their gradients to ``source``."""
    outward, back = (source, source_stream, target, target_stream), (target, target_stream, source, source_stream)
    return _as_tuple(Copy.apply(outward, back, *tensors))  # type: ignore[no-untyped-call]  # Function.apply is untyped


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _outputs(ctx: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # By default, all outputs of a Function require grad.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(output for input, output in zip(inputs, outputs) if not input.requires_grad))
    return outputs


_Route: TypeAlias = tuple[Place, _Stream, Place, _Stream]


class Wait(Function):
    # In the backward the engine waits: the next node's stream for this node's, which was current in the forward.
    @staticmethod
    def forward(ctx: Any, before: _Stream, after: _Stream, *inputs: Tensor) -> tuple[Tensor, ...]:
        if before is not None and after is not None:
            after.wait_stream(before)
        return _outputs(ctx, inputs, tuple(tensor.detach() for tensor in inputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *grads


class Copy(Function):
    """The copy of tensors to another place. Its backward copies their gradients back."""

    @staticmethod
    def forward(ctx: Any, outward: _Route, back: _Route, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        return _outputs(ctx, inputs, tuple(_moved(tensor, *outward) for tensor in inputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *(None if grad is None else _moved(grad, *ctx.back) for grad in grads)


def _moved(tensor: Tensor, source: Place, source_stream: _Stream, target: Place, target_stream: _Stream) -> Tensor:
    with on(source_stream), on(target_stream):
        moved = _transfer(tensor, target.device)
    # The allocator knows the streams that made these tensors; it must also know those that read them.
    _record(tensor, source_stream)
    _record(moved, target.compute)
    return moved


def _transfer(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        # With create_graph=True (double backward) the gradient needs a graph through this.
        return tensor[...] if torch.is_grad_enabled() else tensor.detach()
    # A copy to or from the CPU must block: the CPU does not wait for streams.
    return tensor.to(device, non_blocking="cpu" not in (tensor.device.type, device.type))


def _record(tensor: Tensor, stream: _Stream) -> None:
    if stream is not None and tensor.device == stream.device:
        tensor.record_stream(stream)


def has_strides(tensor: Tensor) -> bool:
    """Whether the elements of ``tensor`` lie in memory by its strides: not those of tensors that hold others."""
    return tensor.layout == torch.strided and not (hasattr(tensor, "__tensor_flatten__") or tensor.is_nested)


def copy_of(tensor: Tensor) -> Tensor:
    """A copy with the strides of ``tensor``, by which torch chooses kernels: ``clone`` leaves gaps and repeats out."""
    copy = tensor.clone()
    if not has_strides(tensor) or copy.stride() == tensor.stride():
        return copy
    strided: Tensor = _Strided.apply(tensor)  # type: ignore[no-untyped-call]  # Function.apply is untyped
    return strided


class _Strided(Function):
    """A copy with the gaps and repeats of its input. A repeat has the gradient that has come for it: ``expand`` would
    give the first one the sum of all."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        once, repeats = [copy, tensor], [dim for dim, stride in enumerate(tensor.stride()) if stride == 0]
        for dim in repeats:
            once = [each.narrow(dim, 0, min(1, each.size(dim))) for each in once]
        once[0].copy_(once[1])
        return detached(of_class(type(tensor), copy))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent
