"""Costs: what the actions of each stage, and the messages between them, take."""
from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Link", "StageCosts"]


@dataclass(frozen=True)
class StageCosts:
    """Of one stage and one micro-batch. Times in seconds (or any one unit), memory in bytes (or in units of A)."""

    forward_seconds: float = 1.0
    input_grad_seconds: float = 1.0
    weight_grad_seconds: float = 1.0
    recompute_seconds: float = 1.0
    saved_bytes: float = 1.0
    """A: everything that a forward saves for its backward."""
    boundary_bytes: float = 0.0
    """c: what a recomputed micro-batch keeps instead, its input. The stage before sends it, and gets its gradient."""
    static_bytes: float = 0.0
    """Parameters, gradients, optimizer state."""
    collective_seconds: float = 0.0
    """Of one forward and backward together, those seconds in which the stage waits for a collective of its own. Only
    the bound counts them as room for a recompute; the simulator does not fill them."""


@dataclass(frozen=True)
class Link:
    """A full-duplex link between neighbouring stages on different ranks. A message occupies one direction of it, and
    arrives, ``latency_seconds + bytes / bandwidth`` after it was sent."""

    latency_seconds: float = 0.0
    bandwidth: float = float("inf")
    """Bytes per second."""
