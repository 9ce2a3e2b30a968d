"""Micro-batches: a mini-batch, split by rows and put together again."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from torchckpt.errors import Fault, raise_faults

__all__ = ["Batch", "gather", "scatter"]

Batch: TypeAlias = Tensor | tuple[Tensor, ...]
"""What goes from stage to stage: a tensor, or a tuple of tensors."""

_WORKS = "pipe(x) or pipe((x, mask)), with tensors of one and the same number of rows, at least one"


def scatter(batch: Batch, chunks: int) -> list[Batch]:
    """Split each tensor of ``batch`` along dimension 0, as evenly as can be, into ``min(chunks, rows)`` parts."""
    tensors = (batch,) if isinstance(batch, Tensor) else batch
    raise_faults("Pipe", _faults(tensors))
    parts = [tensor.tensor_split(min(chunks, len(tensor))) for tensor in tensors]
    return list(parts[0]) if isinstance(batch, Tensor) else list(zip(*parts))


def gather(outputs: Sequence[Batch]) -> Batch:
    """Concatenate the outputs of the micro-batches along dimension 0."""
    first = outputs[0]
    raise_faults("Pipe", _output_faults(first))
    if isinstance(first, Tensor):
        return torch.cat([output for output in outputs if isinstance(output, Tensor)])
    return tuple(torch.cat(parts) for parts in zip(*outputs))


def _faults(tensors: object) -> list[Fault]:
    if not isinstance(tensors, tuple) or not tensors or not all(isinstance(t, Tensor) for t in tensors):
        parts = f" of ({', '.join(type(t).__name__ for t in tensors)})" if isinstance(tensors, tuple) else ""
        return [Fault("the input must be a tensor or a tuple of tensors", type(tensors).__name__ + parts, _WORKS)]
    shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
    if any(t.dim() == 0 for t in tensors):
        return [Fault("every input must have a batch dimension to be split along", f"shapes {shapes}", _WORKS)]
    if len({len(t) for t in tensors}) > 1:
        return [Fault("all inputs must have the same number of rows", f"shapes {shapes}", _WORKS)]
    if len(tensors[0]) == 0:
        return [Fault("a mini-batch must have at least one row", f"shapes {shapes}", _WORKS)]
    return []


def _output_faults(output: object) -> list[Fault]:
    tensors = output if isinstance(output, tuple) else (output,)
    if tensors and all(isinstance(t, Tensor) and t.dim() for t in tensors):
        return []
    received = ", ".join(f"shape {tuple(t.shape)}" if isinstance(t, Tensor) else type(t).__name__ for t in tensors)
    rule = "the last stage must return a tensor or a tuple of tensors, each with a batch dimension to be gathered along"
    return [Fault(rule, received or "()", "a last layer that returns logits; loss_fn(pipe(x), target) outside")]
