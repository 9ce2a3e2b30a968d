"""Trace lock: one thread traces at a time, and meanwhile no other thread calls a model: modules hold traced tensors."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, get_ident
from typing import Any

import torch

__all__ = ["TRACE_LOCK", "TraceLock", "outside_graph"]

class TraceLock:
    """A lock between threads that call and threads that trace. Inside either, a thread may again call or trace."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._callers: Counter[int] = Counter()  # by thread, how many calls it is in
        self._waiting: set[int] = set()
        self._tracer, self._depth = 0, 0

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Wait until no other thread traces. Inside this context, modules hold their own tensors, not traced ones."""
        me = get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._tracer in (0, me))
            self._callers[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._callers[me] -= 1
                self._callers += Counter()  # drop threads that are in no call
                self._changed.notify_all()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Wait until no other thread traces or calls a model. A caller that waits to trace does not count."""
        me = get_ident()
        with self._changed:
            self._waiting.add(me)
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._tracer in (0, me) and set(self._callers) <= self._waiting)
            finally:
                self._waiting.discard(me)
            self._tracer, self._depth = me, self._depth + 1
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                self._tracer = me if self._depth else 0
                self._changed.notify_all()


TRACE_LOCK = TraceLock()
"""One lock for all models: torch's own tracing state (tracer, notes on nodes) is not per thread either."""


@torch.compiler.disable(  # type: ignore[untyped-decorator,no-untyped-call]  # untyped in torch
    reason="a rematerialized module has its own graphs, and runs outside compiled ones; torch.compile the model with "
    "backend=torchckpt.graph.backend(budget=...) instead, or rematerialize(engine=\"inductor\"), or drop fullgraph=True"
)
def outside_graph(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``run(*args, **kwargs)`` after a graph break. With ``fullgraph=True``, Dynamo raises an error instead."""
    return run(*args, **kwargs)
