"""Flags of this library, by thread: ``is_checkpointing()``, ``is_recomputing()``, and what a running replay holds."""
from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch import Tensor, nn

__all__ = ["Noted", "Replay", "is_checkpointing", "is_recomputing", "local", "state_lock"]


state_lock = threading.RLock()
"""It is held by

* replays, while modules hold substitutes,
* forwards that change buffers, so that none changes a substitute,
* replays that draw from a generator which other threads share, or need another default dtype or stance,
* traces of modules (torchckpt.graph) and counts of costs (torchckpt.costs).
"""


class Replay(list[nn.Module]):
    """The state of one running replay: a list of the norm layers that now hold copies of their buffers (norms.py)."""

    made: set[int | None]
    """Keys of the storages that it has made. Only set where a dispatch mode runs that did not run in the forward."""
    skips: dict[Any, Any]
    """The skips that layers have stashed in this replay (torchckpt.pipe.skip). Not set until the first one."""
    ran: Mapping[nn.Module, Mapping[str, Tensor]]
    """The norm layers that the forward has run, each with copies of its buffers from before, or with nothing."""
    watched: list[nn.Module]
    """The norm layers that have hooks, by which they are lent copies."""
    lent: Set[nn.Module] = frozenset()
    """Those whose own buffers are lent, too: they keep the copies to the end, as code may read what they update."""
    compiles = False
    """Whether Dynamo has compiled code in it."""


class Noted(list[nn.Module]):
    """The norm layers found so far in a forward (norms.py)."""

    read: Sequence[tuple[nn.Module, tuple[int, int]]] = ()
    """The layers that have read their statistics, each with the versions of its buffers."""


class _Thread:
    def __init__(self) -> None:
        self.flags: tuple[bool, bool, Replay | None] = (False, False, None)
        """Whether it runs a forward of a region; whether it replays one; and that replay."""
        self.scope: Any = None  # runs the regions that it enters, on behalf of a schedule (core/scope.py)
        self.norms: Noted | None = None
        """Those of the forward that it runs."""
        self.order: Any = None  # when the regions that it moves to the host are released and fetched (moved/order.py)
        self.skips: Any = None  # of the stage that it runs, or of layers outside of a pipe (pipe/skip.py)
        self.workers: Any = None  # a weak reference to the threads of its last forward of a pipe (pipe/run/worker.py)
        self.tracing: object = None  # the tracer (torchckpt.graph) that now traces this thread's calls as a graph


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = _Thread()
        """What this thread is doing: one object, since an attribute of a thread-local takes longer to set."""


local = _Local()


def is_checkpointing() -> bool:
    """Whether this thread is in the forward of a region, whose activations are dropped.

    Both flags are per thread and independent: (True, False) in a first forward, (False, True) in a replay, and
    (True, True) where the replay of an outer region runs the forward of an inner one.
    """
    return local.thread.flags[0]


def is_recomputing() -> bool:
    """Whether this thread is replaying a region. Guard side effects with it.

    >>> class Counted(torch.nn.Linear):
    ...     calls = 0
    ...     def forward(self, input):
    ...         if not torchckpt.is_recomputing():
    ...             self.calls += 1        # once per forward, at any depth of nesting
    ...         return super().forward(input)
    """
    return local.thread.flags[1]
