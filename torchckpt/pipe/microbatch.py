"""Micro-batches: split a mini-batch by rows, and concatenate the outputs."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchckpt.errors import Fault, check, raise_fault
from torchckpt.tensors import copy_attributes, hides_tensors, is_iterator

__all__ = ["REDUCTIONS", "MicroBatch", "NoChunk", "gather", "scatter"]

REDUCTIONS = ("mean", "sum")
_WORKS = "pipe(x, mask, scale=2.0), with tensors that have the same number of rows; NoChunk(table) for other tensors"


@dataclass(frozen=True)
class NoChunk:
    """Wraps an argument of a :class:`~torchckpt.Pipe` that goes to every micro-batch as a whole.

    >>> pipe(x, NoChunk(position_table))
    """

    value: Any


class MicroBatch(NamedTuple):
    """One part of a mini-batch: the arguments of the first layer, and the number of rows."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int


def scatter(args: tuple[Any, ...], kwargs: dict[str, Any], chunks: int, dim: int = 0) -> list[MicroBatch]:
    """Split each tensor in the pytrees ``args`` and ``kwargs`` along ``dim`` into ``min(chunks, rows)`` parts, as
    evenly as possible. All else, and all values in :class:`NoChunk`, go to each part unchanged."""
    paths, spec = pytree.tree_flatten_with_path((args, kwargs))
    tensors = [(pytree.keystr(path), leaf) for path, leaf in paths if isinstance(leaf, Tensor)]
    check([*_hidden_faults(paths), *_faults(tensors, dim)])
    rows = tensors[0][1].size(dim)
    m = min(chunks, rows)
    check([fault for named in tensors for fault in _layout_faults(*named)] if m > 1 else [])
    parts_of = {id(leaf): _parts(leaf, m, dim) for _, leaf in tensors}  # a tensor that is passed twice is split once
    wholes = [leaf.value if isinstance(leaf, NoChunk) else leaf for _, leaf in paths]
    parts = [parts_of[id(leaf)] if isinstance(leaf, Tensor) else [whole] * m for (_, leaf), whole in zip(paths, wholes)]
    sizes = [rows // m + (part < rows % m) for part in range(m)]  # as tensor_split makes them
    calls = [pytree.tree_unflatten(leaves, spec) for leaves in zip(*parts)]
    return [MicroBatch(positional, named, size) for (positional, named), size in zip(calls, sizes)]


def _parts(tensor: Tensor, m: int, dim: int) -> Sequence[Tensor]:
    if m == 1:
        return (tensor,)
    return [copy_attributes(tensor, part) for part in tensor.tensor_split(m, dim)]


def gather(outputs: Sequence[Any], rows: Sequence[int], dim: int = 0, reduce: str | None = None) -> Any:
    """Combine the outputs of all micro-batches into one. Tensors are concatenated along ``dim``. Scalars are combined
    by ``reduce``, a mean being weighted by ``rows``. Other objects must be equal, and the first is returned."""
    flat = [pytree.tree_flatten(output) for output in outputs]
    specs = [spec for _, spec in flat]
    other = next((spec for spec in specs if spec != specs[0]), None)
    if other is not None:
        rule = "the last stage returns another structure for a later micro-batch"
        raise_fault(Fault(rule, f"{specs[0]}, then {other}", "a last layer that returns a tensor"))
    columns = list(zip(*(leaves for leaves, _ in flat)))
    check([fault for column in columns for fault in _output_faults(column, rows, dim, reduce)])
    unique = {tuple(map(id, column)): column for column in columns}  # a tensor that is returned twice is combined once
    combined = {key: _gathered(column, rows, dim, reduce) for key, column in unique.items()}
    return pytree.tree_unflatten([combined[tuple(map(id, column))] for column in columns], specs[0])


def _gathered(column: tuple[Any, ...], rows: Sequence[int], dim: int, reduce: str | None) -> Any:
    first = column[0]
    if not isinstance(first, Tensor):
        return first
    if first.dim():
        return copy_attributes(first, torch.cat(column, dim))
    if reduce == "sum":
        return torch.stack(column).sum()
    weights = [count / sum(rows) for count in rows]
    return torch.stack([scalar * weight for scalar, weight in zip(column, weights)]).sum()


def _hidden_faults(paths: Sequence[tuple[Any, Any]]) -> Iterator[Fault]:
    rule = "tensors to be split are in a container that torch's pytree does not know, unlike list, tuple and dict"
    works = "pipe(dict(batch)), or another such container; NoChunk(batch) if it must not be split"
    for path, leaf in paths:
        if hides_tensors(leaf) and type(leaf) is not NoChunk:
            yield Fault(rule, f"{_named(pytree.keystr(path))}, a {type(leaf).__name__} that has tensors", works)
        if is_iterator(leaf.value if type(leaf) is NoChunk else leaf):
            of_first = "an argument is an iterator, of which later micro-batches get only what the first has left"
            yield Fault(of_first, _named(pytree.keystr(path)), "pipe(x, list(parts))")


def _faults(tensors: Sequence[tuple[str, Tensor]], dim: int) -> list[Fault]:
    if not tensors:
        return [Fault("no input is a tensor, or holds one, to be split along its rows", "no tensor", _WORKS)]
    shapes = ", ".join(f"{_named(path)} of shape {tuple(tensor.shape)}" for path, tensor in tensors)
    if any(tensor.dim() <= dim for _, tensor in tensors):
        return [Fault(f"a tensor has no dimension {dim}, to be split along", shapes, _WORKS)]
    if len({tensor.size(dim) for _, tensor in tensors}) > 1:
        return [Fault(f"the tensors differ in the number of rows, in dimension {dim}", shapes, _WORKS)]
    if tensors[0][1].size(dim) == 0:
        return [Fault("the mini-batch has no rows", shapes, _WORKS)]
    return []


def _layout_faults(path: str, tensor: Tensor) -> Iterator[Fault]:
    if tensor.layout != torch.strided:  # torch splits no other by rows
        rule = "a tensor that is not strided cannot be split along its rows"
        works = "pipe(x.to_dense()), or chunks=1; NoChunk(table) for a tensor that goes to every micro-batch as a whole"
        yield Fault(rule, f"{_named(path)} of layout {tensor.layout}", works)


def _named(path: str) -> str:
    """The name of a path: ``input 1['mask']`` for ``[0][1]['mask']``, ``mask=`` for ``[1]['mask']``."""
    if path.startswith("[0]"):
        number, _, rest = path[4:].partition("]")
        return f"input {number}{rest}"
    name, _, rest = path[5:].partition("']")
    return f"{name}={rest}"


def _output_faults(column: Sequence[Any], rows: Sequence[int], dim: int, reduce: str | None) -> Iterator[Fault]:
    first = column[0]
    if not all(isinstance(leaf, Tensor) for leaf in column):
        if any(isinstance(leaf, Tensor) for leaf in column) or any(not _is_same(other, first) for other in column):
            rule = "the last stage returns an object other than a tensor, which is not equal for all micro-batches"
            received = ", ".join("a tensor" if isinstance(leaf, Tensor) else repr(leaf) for leaf in column)
            yield Fault(rule, received, "a tensor instead, such as torch.tensor([count])")
    elif first.dim() == 0:
        if reduce is None:
            rule = "the last layer returns a scalar for each micro-batch, and there is no reduce= to combine them"
            yield Fault(rule, "shape ()", 'Pipe(..., reduce="mean"), weighted by rows; or Pipe(..., reduce="sum")')
    elif first.dim() <= dim:
        rule = f"an output has no dimension {dim}, along which the micro-batches are concatenated"
        yield Fault(rule, f"shape {tuple(first.shape)}", f"a last layer that returns rows in dimension {dim}")
    elif len({leaf.size(dim) / count for leaf, count in zip(column, rows)} | {first.size(dim) // rows[0]}) > 1:
        rule = f"the rows of an output, in dimension {dim}, are no multiple of those of its micro-batch"
        shapes = ", ".join(f"shape {tuple(leaf.shape)} of {count} rows" for leaf, count in zip(column, rows))
        yield Fault(rule, shapes, "a last layer whose outputs have one entry for each row")


def _is_same(first: Any, second: Any) -> bool:
    try:
        return first is second or bool(first == second)
    except (ValueError, RuntimeError):  # such as NumPy arrays, whose == has no truth value
        return repr(first) == repr(second)
