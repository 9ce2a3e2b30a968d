"""``is_checkpointing()`` and ``is_recomputing()``: what the current thread is doing."""
from __future__ import annotations

import threading

from torch import nn

__all__ = ["flags", "is_checkpointing", "is_recomputing"]


class _Flags(threading.local):
    checkpointing = False
    recomputing = False
    norm_layers: list[nn.Module] | None = None  # those that this thread's replay has met (norms.py); None outside one


flags = _Flags()


def is_checkpointing() -> bool:
    """Whether this thread is in the forward of a region, whose activations are dropped.

    Both flags are per thread and independent: (True, False) in a first forward, (False, True) in a replay, and
    (True, True) where the replay of an outer region runs the forward of an inner one.
    """
    return flags.checkpointing


def is_recomputing() -> bool:
    """Whether this thread is replaying a region. Guard side effects with it.

    >>> class Counted(torch.nn.Linear):
    ...     calls = 0
    ...     def forward(self, input):
    ...         if not torchckpt.is_recomputing():
    ...             self.calls += 1        # once per forward, at any depth of nesting
    ...         return super().forward(input)
    """
    return flags.recomputing
