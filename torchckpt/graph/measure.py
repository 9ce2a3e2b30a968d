"""Measure: run each kind of operation once, for what it allocates, how long it takes, and whether it draws."""
from __future__ import annotations

import operator
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from torchckpt.graph.private.operators import is_branching, is_collective, is_mutable
from torchckpt.graph.private.runtime import allocations, storage_of, without_modes
from torchckpt.graph.private.surroundings import without_autocast
from torchckpt.graph.rng import generator_state, replayed

__all__ = ["Measure", "Measured"]

_DTYPES = "dtypes"
"""Where the nodes of operations keep those that were seen."""


class Measured(NamedTuple):
    """Of a kind of operation: what it allocates at its highest point beside its outputs, the least time of its runs,
    of each tensor that it returns the storage, where it is the first in it, and the dtype, and whether it draws random numbers and does not say so."""

    workspace_bytes: int = 0
    seconds: float = 0.0
    made_bytes: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype | None, ...] = ()
    draws: bool = False


class Measure:
    """What operations take, by what they are called with: shapes, strides, dtypes, devices, constants.

    A kernel may copy its input to another layout, or hold one buffer for each thread: no shape tells, so it is run, on
    random numbers, and on zeros where they are integers. A kernel that refuses them counts as taking nothing.

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
        node.meta[_DTYPES] = self._found[key].dtypes
        return self._found[key]

    def _run(self, node: fx.Node) -> Measured:
        if not callable(node.target) or is_collective(node.target) or is_mutable(node.target):
            return Measured()
        device = _device(node)
        with _aside():
            try:
                value = _followed if "rnn" in str(node.target) else lambda used: _real(_likely(used))
                arguments, named = fx.node.map_arg((node.args, node.kwargs), value)
                if node.target is replayed:
                    arguments = (generator_state(str(arguments[1])), *arguments[1:])  # drawn bytes are no state
                given = set(map(storage_of, _tensors((arguments, named))))
                runs = [_bound(node.target, those, named) for those in _ways(node, arguments)]
                found = [self._measured(run, given, device) for run in runs]
            except Exception:  # what a kernel of the user's raises on made-up numbers is no error of the step's
                return Measured()
            return max(found, key=lambda one: one.workspace_bytes)._replace(
                seconds=max(one.seconds for one in found),
                made_bytes=tuple(map(max, zip(*(one.made_bytes for one in found)))),
                draws=any(one.draws for one in found),
            )

    def _measured(self, run: Callable[[], Any], given: set[int], device: str) -> Measured:
        """``given`` are the storages that ``run`` reads."""
        before = generator_state(device)
        seconds = min((_timed(run) for _ in range(self._rounds)), default=0.0)
        workspace_bytes, made = _allocated(run, device)
        known, sizes = set(given), []
        for part in _tensors(made):
            sizes.append(0 if storage_of(part) in known else _storage_bytes(part))
            known.add(storage_of(part))
        dtypes = tuple(getattr(part, "dtype", None) for part in made)
        return Measured(workspace_bytes, seconds, tuple(sizes), dtypes, not torch.equal(before, generator_state(device)))


def _ways(node: fx.Node, arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The arguments; where a value among them decides what is run, for each of its values."""
    if not is_branching(node.target):
        return [arguments]
    return [(torch.tensor(way), *arguments[1:]) for way in (True, False)]


def _followed(node: fx.Node) -> Any:
    """What a recurrent layer has made, for its backward trusts the buffer of its library's; of others :func:`_real`."""
    views = [node]
    while views[-1].op == "call_function" and len(views[-1].all_input_nodes) == 1:
        views.append(views[-1].all_input_nodes[0])
    layer = views.pop()
    name = str((layer.target, *layer.args[:1])) if layer.op == "call_function" else ""
    if "rnn" not in name or "backward" in name:
        return _real(_likely(node))
    made: dict[fx.Node, Any] = {}
    for one in (layer, *reversed(views)):
        given = fx.node.map_arg(one.args, lambda used: made[used] if used in made else _real(_likely(used)))
        made[one] = cast(Callable[..., Any], one.target)(*given)
    return made[node]


def _likely(node: fx.Node) -> Any:
    """The value of a node in the trace, of the dtype that was seen where it is made.

    Statistics of a layer norm are traced in the dtype of its data; a CPU makes them in that of its weights.
    """
    value: Any = node.meta.get("val")
    seen = _seen_dtype(node)
    return value if seen is None or value.dtype == seen else value.to(seen)


def _seen_dtype(node: fx.Node) -> torch.dtype | None:
    if not isinstance(node.meta.get("val"), Tensor):
        return None
    source, place = cast(tuple[fx.Node, int], node.args) if node.target is operator.getitem else (node, 0)
    if seen := source.meta.get(_DTYPES):
        return cast("torch.dtype | None", seen[place])
    read = node.all_input_nodes  # of a view, what it is a view of
    is_alike = len(read) == 1 and getattr(read[0].meta.get("val"), "dtype", None) == node.meta["val"].dtype
    return _seen_dtype(read[0]) if is_alike else None


def _real(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, _drawn, value)


def _drawn(like: Tensor) -> Tensor:
    if not _is_strided(like):
        return torch.zeros(like.shape, dtype=like.dtype, layout=like.layout, device=like.device)
    size = like.untyped_storage().nbytes() // like.element_size()
    storage = torch.zeros(size, dtype=like.dtype, device=like.device)
    if like.dtype.is_floating_point:
        storage.uniform_()
    return storage.as_strided(like.shape, like.stride())


def _bound(target: Callable[..., Any], arguments: Any, named: Any) -> Callable[[], Any]:
    return lambda: target(*arguments, **named)


def _allocated(run: Callable[[], Any], device: str) -> tuple[int, list[Any]]:
    """At the highest point beside the outputs; and the outputs."""
    results: list[Any] = []
    changes = allocations(lambda: results.append(run()), device)
    return max(accumulate(changes), default=0) - sum(changes), pytree.tree_leaves(results)


def _tensors(value: Any) -> list[Tensor]:
    return [part for part in pytree.tree_leaves(value) if isinstance(part, Tensor)]


def _storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if _is_strided(tensor) else 0


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
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
    return next((tensor.device.type for tensor in _tensors(node.meta.get("val"))), "cpu")


@contextmanager
def _aside() -> Iterator[None]:
    """Run operations in the midst of a trace, without it, and without a change to the generators."""
    with without_modes(), without_autocast(), torch.no_grad(), torch.random.fork_rng():
        yield
