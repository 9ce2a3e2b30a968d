"""Measure: run each kind of operation once, for what it allocates for itself and how long it takes."""
from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from torchckpt.graph.private import allocations, is_collective, is_mutable, without_modes
from torchckpt.graph.rng import generator_state, replayed

__all__ = ["Measure"]


class Measure:
    """What operations take, by what they are called with: shapes, strides, dtypes, devices, constants.

    A kernel may copy its input to another layout, or hold one buffer for each thread: no shape tells, so it is run, on
    random numbers, and on zeros where they are integers. A kernel that refuses them counts as taking nothing.

    Args:
        rounds: how often an operation is timed; the least time counts. 0: it is run once, and not timed.
    """

    def __init__(self, rounds: int = 0) -> None:
        self._rounds = rounds
        self._found: dict[Hashable, tuple[int, float]] = {}
        self._inputs: dict[Hashable, Tensor] = {}

    def workspace_bytes(self, node: fx.Node) -> int:
        """What it has allocated at its highest point, beside its outputs."""
        return self._of(node)[0]

    def seconds(self, node: fx.Node) -> float:
        return self._of(node)[1]

    def forget_inputs(self) -> None:
        """Free the tensors that operations were run on; what was found stays."""
        self._inputs.clear()

    def _of(self, node: fx.Node) -> tuple[int, float]:
        key = _signature(node)
        if key not in self._found:
            self._found[key] = self._run(node)
        return self._found[key]

    def _run(self, node: fx.Node) -> tuple[int, float]:
        is_opaque = "rnn" in str(node.target)  # reads a buffer of a library's own making, and trusts it
        if not callable(node.target) or is_opaque or is_collective(node.target) or is_mutable(node.target):
            return 0, 0.0
        with _aside():
            arguments, named = fx.node.map_arg((node.args, node.kwargs), lambda used: self._real(used.meta.get("val")))
            if node.target is replayed:
                arguments = (generator_state(str(arguments[1])), *arguments[1:])  # drawn bytes are no state
            run = _bound(node.target, arguments, named)
            try:
                least = min((_timed(run) for _ in range(self._rounds)), default=0.0)
                return _workspace_bytes(run, _device(node)), least
            except (RuntimeError, IndexError, ValueError):
                return 0, 0.0

    def _real(self, value: Any) -> Any:
        return pytree.tree_map_only(Tensor, self._drawn, value)

    def _drawn(self, like: Tensor) -> Tensor:
        if like.layout != torch.strided:
            return torch.zeros(like.shape, dtype=like.dtype, layout=like.layout, device=like.device)
        key = _kind(like)
        if key not in self._inputs:
            size = like.untyped_storage().nbytes() // like.element_size()
            storage = torch.zeros(size, dtype=like.dtype, device=like.device)
            if like.dtype.is_floating_point:
                storage.uniform_()
            self._inputs[key] = storage.as_strided(like.shape, like.stride())
        return self._inputs[key]


def _bound(target: Callable[..., Any], arguments: Any, named: Any) -> Callable[[], Any]:
    return lambda: target(*arguments, **named)


def _workspace_bytes(run: Callable[[], Any], device: str) -> int:
    results: list[Any] = []
    changes = allocations(lambda: results.append(run()), device)
    return max(accumulate(changes), default=0) - sum(changes)


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _signature(node: fx.Node) -> Hashable:
    kinds: Callable[[fx.Node], Any] = lambda used: _Kinds(used.meta.get("val"))  # noqa: E731
    arguments = fx.node.map_arg((node.args, node.kwargs), kinds)
    return node.target, repr(arguments)


class _Kinds:
    """Stands for a node among the arguments of another."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        return repr(pytree.tree_map_only(Tensor, _kind, self._value))


def _kind(tensor: Tensor) -> Hashable:
    if tensor.layout != torch.strided:
        return tuple(tensor.shape), tensor.dtype, tensor.device
    return tuple(tensor.shape), tensor.stride(), tensor.untyped_storage().nbytes(), tensor.dtype, tensor.device


def _device(node: fx.Node) -> str:
    tensors = (part for part in pytree.tree_leaves(node.meta.get("val")) if isinstance(part, Tensor))
    return next((tensor.device.type for tensor in tensors), "cpu")


@contextmanager
def _aside() -> Iterator[None]:
    """Run operations in the midst of a trace, without it, and without a change to the generators."""
    with without_modes(), torch.no_grad(), torch.random.fork_rng():
        yield
