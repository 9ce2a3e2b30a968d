"""Measure: run each kind of operation, to find its bytes, its seconds, and whether it draws random numbers."""
from __future__ import annotations

import operator
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from torchckpt.graph.private.runtime import (
    allocations,
    is_branching,
    is_check,
    is_collective,
    is_mutable,
    parts_of,
    storage_of,
    without_modes,
)
from torchckpt.graph.private.surroundings import without_autocast
from torchckpt.graph.step.rng import generator_state, replayed
from torchckpt.tensors import tensors_in

__all__ = ["Measure", "Measured", "bytes_of"]

_SEEN = "seen"
"""Key in a node's ``meta``: the kinds of tensors that its operation returned in a run."""

Kind: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
"""The dtype and shape of a tensor."""


class Measured(NamedTuple):
    """The measurements of one kind of operation: the bytes that it allocates at its highest point beside its outputs;
    the least time of its runs; for each returned tensor, the bytes of its storage (0 if an earlier one shares it) and
    its kind; and whether it drew random numbers although its operator is not tagged as random."""

    workspace_bytes: int = 0
    seconds: float = 0.0
    made_bytes: tuple[int, ...] = ()
    kinds: tuple[Kind | None, ...] = ()
    draws: bool = False


class Measure:
    """Measures operations, once for each combination of shapes, strides, dtypes, devices and constants.

    A kernel may copy its input to another layout, or hold one buffer for each thread. Shapes do not tell this, so the
    kernel is run on random numbers, with all integers 0, and again with all integers 1; the larger result counts. (An
    embedding bag without words allocates nothing, for example.) If the kernel raises on both, a copy of all its inputs
    and outputs is assumed as its workspace, and a warning says so.

    Args:
        rounds: how often an operation is timed; the least time counts. Default: 0, it is run but not timed.
    """

    def __init__(self, rounds: int = 0) -> None:
        self._rounds = rounds
        self._found: dict[Hashable, Measured] = {}

    def of(self, node: fx.Node) -> Measured:
        key = _signature(node)
        if key not in self._found:
            self._found[key] = self._run(node)
        node.meta[_SEEN] = self._found[key].kinds
        return self._found[key]

    def _run(self, node: fx.Node) -> Measured:
        if not callable(node.target) or is_collective(node.target) or is_mutable(node.target):
            return Measured()
        if is_check(node.target):  # an assertion may fail on made-up numbers, which stops a GPU for good
            return Measured()
        if "meta" in map(_device, [node, *node.all_input_nodes]):  # meta tensors have no bytes
            return Measured()
        runs, refused = list[Measured](), ""
        for whole in (0, 1) if _may_be_ones(node) else (0,):
            try:
                with _aside():
                    runs += self._runs_on(node, whole)
            except Exception as error:  # made-up numbers may be invalid arguments
                if "Profiler is already enabled" in str(error):  # torch allows one profiler at a time
                    return Measured()
                refused = refused or f"{type(error).__name__}: {error}".splitlines()[0]
        if runs:
            return max(runs, key=lambda run: run.workspace_bytes)._replace(
                seconds=max(run.seconds for run in runs),
                made_bytes=tuple(map(max, zip(*(run.made_bytes for run in runs)))),
                kinds=runs[0].kinds,
                draws=any(run.draws for run in runs),
            )
        warnings.warn(
            f"{node.target} cannot be measured: on made-up numbers it raises {refused}; "
            "its workspace counts as a copy of all that it reads and writes", stacklevel=2,
        )
        return Measured(sum(map(bytes_of, [*node.all_input_nodes, node])))

    def _runs_on(self, node: fx.Node, whole: int) -> list[Measured]:
        """Measure runs on random numbers, with all integers equal to ``whole``; one run for each branch."""
        value = partial(_followed if "rnn" in str(node.target) else _made_up, whole=whole)
        arguments, named = fx.node.map_arg((node.args, node.kwargs), value)
        if node.target is replayed:
            arguments = (generator_state(str(arguments[1])), *arguments[1:])  # random bytes are not a valid state
        inputs = set(map(storage_of, tensors_in((arguments, named))))
        target = cast(Callable[..., Any], node.target)
        runs = [partial(target, *values, **named) for values in _ways(node, arguments)]
        return [self._measured(run, inputs, _device(node)) for run in runs]

    def _measured(self, run: Callable[[], Any], inputs: set[int], device: str) -> Measured:
        """Measure one run. ``given`` are the storages that it reads, which are not counted as made."""
        before = generator_state(device)
        seconds = min((_timed(run) for _ in range(self._rounds)), default=0.0)
        workspace_bytes, results = _allocated(run, device)
        known, sizes = set(inputs), []
        for tensor in tensors_in(results):
            parts = parts_of(tensor)
            is_new = any(storage_of(part) not in known for part in parts)
            sizes.append(sum(part.untyped_storage().nbytes() for part in parts) if is_new else 0)
            known.update(map(storage_of, parts))
        kinds = tuple((result.dtype, tuple(result.shape)) if isinstance(result, Tensor) else None for result in results)
        return Measured(workspace_bytes, seconds, tuple(sizes), kinds, not torch.equal(before, generator_state(device)))


def _ways(node: fx.Node, arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The arguments to run with: one set, or one for each branch of ``torch.cond``."""
    if not is_branching(node.target):
        return [arguments]
    return [(torch.tensor(way), *arguments[1:]) for way in (True, False)]


def _followed(node: fx.Node, whole: int) -> Any:
    """The value of ``node``: really computed for a recurrent layer, whose backward reads its buffer; else made up."""
    views = [node]
    while views[-1].op == "call_function" and len(views[-1].all_input_nodes) == 1:
        views.append(views[-1].all_input_nodes[0])
    layer = views.pop()
    name = str((layer.target, *layer.args[:1])) if layer.op == "call_function" else ""
    if "rnn" not in name or "backward" in name:
        return _made_up(node, whole)
    values: dict[fx.Node, Any] = {}
    for step in (layer, *reversed(views)):
        arguments = fx.node.map_arg(step.args, lambda used: values[used] if used in values else _made_up(used, whole))
        values[step] = cast(Callable[..., Any], step.target)(*arguments)
    return values[node]


def _likely(node: fx.Node) -> Any:
    """The traced value of ``node``, with the dtype and shape that its operation returned in a run.

    The two may differ. A layer norm's statistics are traced in the dtype of its data, but a CPU makes them in the dtype
    of its weights. The offsets of an embedding bag are traced as empty.
    """
    value: Any = node.meta.get("val")
    if not isinstance(value, Tensor):
        return value
    seen = _seen(node)
    dtype = _seen_dtype(node) or value.dtype
    value = value if value.dtype == dtype else value.to(dtype)
    return value if seen is None or value.numel() else value.new_empty(seen[1])


def _seen(node: fx.Node) -> Kind | None:
    source, place = cast(tuple[fx.Node, int], node.args) if node.target is operator.getitem else (node, 0)
    seen: tuple[Kind | None, ...] = source.meta.get(_SEEN) or ()
    return seen[place] if seen else None


def _seen_dtype(node: fx.Node) -> torch.dtype | None:
    seen = _seen(node)
    if seen is not None:
        return seen[0]
    read = node.all_input_nodes  # the base, if the node is a view
    is_alike = len(read) == 1 and getattr(read[0].meta.get("val"), "dtype", None) == node.meta["val"].dtype
    return _seen_dtype(read[0]) if is_alike else None


def _made_up(node: fx.Node, whole: int) -> Any:
    return pytree.tree_map_only(Tensor, partial(_drawn, whole=whole), _likely(node))


def _drawn(like: Tensor, whole: int) -> Tensor:
    if not _is_strided(like):
        return torch.zeros(like.shape, dtype=like.dtype, layout=like.layout, device=like.device)
    size = like.untyped_storage().nbytes() // like.element_size()
    storage = torch.full((size,), whole, dtype=like.dtype, device=like.device)
    if like.dtype.is_floating_point:
        storage.uniform_()
    return storage.as_strided(like.shape, like.stride())


def _may_be_ones(node: fx.Node) -> bool:
    """Whether the integers among the inputs may all be 1 and still be valid indices: no size or count is below 2."""
    tensors = [tensor for used in node.all_input_nodes for tensor in tensors_in(_likely(used))]
    has_integers = any(not (tensor.is_floating_point() or tensor.is_complex()) for tensor in tensors)
    sizes = [size for tensor in tensors for size in tensor.shape]
    counts = [value for value in pytree.tree_leaves((node.args, node.kwargs)) if type(value) is int]
    return has_integers and all(size > 1 for size in [*sizes, *counts])


def bytes_of(node: fx.Node) -> int:
    """The bytes of the tensors that ``node`` makes, by their shapes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(node.meta.get("val")))


def _allocated(run: Callable[[], Any], device: str) -> tuple[int, list[Any]]:
    """Bytes allocated beside the outputs at the highest point of ``run()``; and the outputs."""
    results: list[Any] = []
    changes = allocations(lambda: results.append(run()), device)
    return max(accumulate(changes), default=0) - sum(changes), pytree.tree_leaves(results)


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def _signature(node: fx.Node) -> Hashable:
    kinds: Callable[[fx.Node], Any] = lambda used: _Kinds(_likely(used))  # noqa: E731
    arguments = fx.node.map_arg((node.args, node.kwargs), kinds)
    return node.target, repr(arguments)


class _Kinds:
    """Stands for a node in the arguments of another; its repr has shapes, dtypes and devices in place of values."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        if isinstance(self._value, fx.GraphModule):
            return f"graph {id(self._value)}"
        return repr(pytree.tree_map_only(Tensor, _kind, self._value))


def _kind(tensor: Tensor) -> Hashable:
    if not _is_strided(tensor):
        return tuple(tensor.shape), tensor.dtype, tensor.device
    return tuple(tensor.shape), tensor.stride(), tensor.untyped_storage().nbytes(), tensor.dtype, tensor.device


def _device(node: fx.Node) -> str:
    return next((tensor.device.type for tensor in tensors_in(node.meta.get("val"))), "cpu")


@contextmanager
def _aside() -> Iterator[None]:
    """Inside this context, operations run for real during a trace, and the generators are restored at its end."""
    with without_modes(), without_autocast(), torch.no_grad(), torch.random.fork_rng():
        yield
