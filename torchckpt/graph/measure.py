"""Measure: run each kind of operation once, for what it allocates, how long it takes, and whether it draws."""
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

from torchckpt.graph.private.operators import is_branching, is_check, is_collective, is_mutable
from torchckpt.graph.private.runtime import allocations, parts_of, storage_of, without_modes
from torchckpt.graph.private.surroundings import without_autocast
from torchckpt.graph.rng import generator_state, replayed
from torchckpt.tensors import tensors_in

__all__ = ["Measure", "Measured"]

_SEEN = "seen"
"""Where the nodes of operations keep the kinds that were seen."""

Kind: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
"""Of a tensor: its dtype and shape."""


class Measured(NamedTuple):
    """Of a kind of operation: what it allocates at its highest point beside its outputs, the least time of its runs, of
    each tensor that it returns the storage, where it is the first in it, and the kind, and whether it draws random
    numbers and does not say so."""

    workspace_bytes: int = 0
    seconds: float = 0.0
    made_bytes: tuple[int, ...] = ()
    kinds: tuple[Kind | None, ...] = ()
    draws: bool = False


class Measure:
    """What operations take, by what they are called with: shapes, strides, dtypes, devices, constants.

    A kernel may copy its input to another layout, or hold one buffer for each thread: no shape tells, so it is run, on
    random numbers, and on zeros where they are integers, or on ones, if that takes more: bags of no words take nothing.
    Of a kernel that refuses both, nobody knows what it takes: it counts as a copy of all that it reads and writes, and
    a warning says so.

    Args:
        rounds: how often an operation is timed; the least time counts. 0: it is run once, and not timed.
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
        if is_check(node.target):  # made-up numbers fail it; on a GPU no operation works after that
            return Measured()
        if "meta" in map(_device, [node, *node.all_input_nodes]):  # nothing there has bytes
            return Measured()
        found, refused = list[Measured](), ""
        for whole in (0, 1) if _may_be_ones(node) else (0,):
            try:
                with _aside():
                    found += self._runs_on(node, whole)
            except Exception as error:  # what a kernel raises on made-up numbers is no error of the step's
                if "Profiler is already enabled" in str(error):  # it is told of one thing at a time
                    return Measured()
                refused = refused or f"{type(error).__name__}: {error}".splitlines()[0]
        if found:
            return max(found, key=lambda one: one.workspace_bytes)._replace(
                seconds=max(one.seconds for one in found),
                made_bytes=tuple(map(max, zip(*(one.made_bytes for one in found)))),
                kinds=found[0].kinds,
                draws=any(one.draws for one in found),
            )
        warnings.warn(
            f"{node.target} cannot be measured: on made-up numbers it raises {refused}; "
            "its workspace counts as a copy of all that it reads and writes", stacklevel=2,
        )
        return Measured(sum(map(_bytes, [*node.all_input_nodes, node])))

    def _runs_on(self, node: fx.Node, whole: int) -> list[Measured]:
        """On random numbers, and on ``whole`` where they are integers; of control flow, each branch."""
        value = partial(_followed if "rnn" in str(node.target) else _made_up, whole=whole)
        arguments, named = fx.node.map_arg((node.args, node.kwargs), value)
        if node.target is replayed:
            arguments = (generator_state(str(arguments[1])), *arguments[1:])  # drawn bytes are no state
        given = set(map(storage_of, tensors_in((arguments, named))))
        target = cast(Callable[..., Any], node.target)
        runs = [_bound(target, those, named) for those in _ways(node, arguments)]
        return [self._measured(run, given, _device(node)) for run in runs]

    def _measured(self, run: Callable[[], Any], given: set[int], device: str) -> Measured:
        """``given`` are the storages that ``run`` reads."""
        before = generator_state(device)
        seconds = min((_timed(run) for _ in range(self._rounds)), default=0.0)
        workspace_bytes, made = _allocated(run, device)
        known, sizes = set(given), []
        for tensor in tensors_in(made):
            parts = parts_of(tensor)
            is_new = any(storage_of(part) not in known for part in parts)
            sizes.append(sum(map(_storage_bytes, parts)) if is_new else 0)
            known.update(map(storage_of, parts))
        kinds = tuple((one.dtype, tuple(one.shape)) if isinstance(one, Tensor) else None for one in made)
        return Measured(workspace_bytes, seconds, tuple(sizes), kinds, not torch.equal(before, generator_state(device)))


def _ways(node: fx.Node, arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The arguments; where a value among them decides what is run, for each of its values."""
    if not is_branching(node.target):
        return [arguments]
    return [(torch.tensor(way), *arguments[1:]) for way in (True, False)]


def _followed(node: fx.Node, whole: int) -> Any:
    """What a recurrent layer has made, for its backward trusts the buffer of its library's; of others: made up."""
    views = [node]
    while views[-1].op == "call_function" and len(views[-1].all_input_nodes) == 1:
        views.append(views[-1].all_input_nodes[0])
    layer = views.pop()
    name = str((layer.target, *layer.args[:1])) if layer.op == "call_function" else ""
    if "rnn" not in name or "backward" in name:
        return _made_up(node, whole)
    made: dict[fx.Node, Any] = {}
    for one in (layer, *reversed(views)):
        given = fx.node.map_arg(one.args, lambda used: made[used] if used in made else _made_up(used, whole))
        made[one] = cast(Callable[..., Any], one.target)(*given)
    return made[node]


def _likely(node: fx.Node) -> Any:
    """The value of a node in the trace, of the kind that was seen where it is made.

    Statistics of a layer norm are traced in the dtype of its data; a CPU makes them in that of its weights. The places
    of the words of bags are traced as none.
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
    read = node.all_input_nodes  # of a view, what it is a view of
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
    """Whether integers among its inputs may be 1 where they are places: a kernel need not look whether there is one."""
    tensors = [tensor for used in node.all_input_nodes for tensor in tensors_in(_likely(used))]
    has_integers = any(not (tensor.is_floating_point() or tensor.is_complex()) for tensor in tensors)
    sizes = [size for tensor in tensors for size in tensor.shape]
    counts = [value for value in pytree.tree_leaves((node.args, node.kwargs)) if type(value) is int]
    return has_integers and all(size > 1 for size in [*sizes, *counts])


def _bytes(node: fx.Node) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(node.meta.get("val")))


def _bound(target: Callable[..., Any], arguments: Any, named: Any) -> Callable[[], Any]:
    return lambda: target(*arguments, **named)


def _allocated(run: Callable[[], Any], device: str) -> tuple[int, list[Any]]:
    """At the highest point beside the outputs; and the outputs."""
    results: list[Any] = []
    changes = allocations(lambda: results.append(run()), device)
    return max(accumulate(changes), default=0) - sum(changes), pytree.tree_leaves(results)


def _storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if _is_strided(tensor) else 0


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
    """Stands for a node among the arguments of another."""

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
    """Run operations in the midst of a trace, without it, and without a change to the generators."""
    with without_modes(), without_autocast(), torch.no_grad(), torch.random.fork_rng():
        yield
