"""Link: seconds of the messages between two stages."""
from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Link"]


@dataclass(frozen=True)
class Link:
    """A full-duplex link between neighbouring stages on different ranks. A message occupies one direction of the link
    for ``latency_seconds + bytes / bandwidth``, and then arrives."""

    latency_seconds: float = 0.0
    bandwidth: float = float("inf")
    """Bytes per second."""
