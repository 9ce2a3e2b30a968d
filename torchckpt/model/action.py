"""Action: one thing that a stage does to one micro-batch, in torch's notation (``0F3``), with ``R`` of our own."""
from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["Action", "Kind"]


class Kind(str, Enum):
    """What is done. ``B`` is a whole backward; ``I`` and ``W`` are its halves, input and weight gradients."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    RECOMPUTE = "R"

    def __str__(self) -> str:
        return self.value


class Action(NamedTuple):
    """``Action(0, Kind.FORWARD, 3)`` is ``0F3``: stage 0, forward, micro-batch 3."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"
