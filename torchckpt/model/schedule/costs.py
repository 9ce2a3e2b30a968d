"""Costs: seconds and bytes of the actions of each stage, and of the messages between stages."""
from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Link", "StageCosts"]


@dataclass(frozen=True)
class StageCosts:
    """Costs of one stage for one micro-batch. Times in seconds (or any unit), memory in bytes (or in units of A)."""

    forward_seconds: float = 1.0
    input_grad_seconds: float = 1.0
    weight_grad_seconds: float = 1.0
    recompute_seconds: float = 1.0
    saved_bytes: float = 1.0
    """A: all activations that a forward saves for its backward."""
    boundary_bytes: float = 0.0
    """c: the stage's input, which a recomputed micro-batch keeps instead of A. The previous stage sends this input and
    receives its gradient."""
    static_bytes: float = 0.0
    """Parameters, gradients, optimizer state."""
    collective_seconds: float = 0.0
    """Seconds that the stage waits for its own collectives (such as tensor parallelism), in one forward and one
    backward together. Only the bound counts them as room for a recompute; the simulator does not fill them."""


@dataclass(frozen=True)
class Link:
    """A full-duplex link between neighbouring stages on different ranks. A message occupies one direction of the link
    for ``latency_seconds + bytes / bandwidth``, and then arrives."""

    latency_seconds: float = 0.0
    bandwidth: float = float("inf")
    """Bytes per second."""
