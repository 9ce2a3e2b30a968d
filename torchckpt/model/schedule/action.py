"""Action: one operation of a stage on one micro-batch, in torch's notation (``0F3``). ``R``, a recompute, is added."""
from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["Action", "Kind"]


class Kind(str, Enum):
    """The kind of an action. ``B`` is a whole backward; ``I`` (input gradients) and ``W`` (weight gradients) are its
    two halves."""

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
