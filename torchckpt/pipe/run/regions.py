"""Regions: which layers of each visit run as regions, for both engines (``pipeline.py``, ``step.py``)."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

from torch import Tensor

from torchckpt.pipe.partition import Stage
from torchckpt.planning import Action
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.options import DEFAULT, Options

__all__ = ["Part", "Regions", "Replay"]


class Part(NamedTuple):
    """Consecutive layers of a stage, on one micro-batch."""

    stage: Stage
    frame: Frame | None
    """The frame of the region that they are; None: their activations are kept."""


class Replay(Protocol):
    """What an action R of a pipeline runs: a frame, or several."""

    def recompute(self) -> None: ...


class Regions:
    """The regions of each visit. Here all layers of a stage are one.

    Args:
        is_recomputed: maps a stage and a micro-batch to whether the visit is a region.
        options: the settings of the regions.
    """

    def __init__(self, is_recomputed: Callable[[int, int], bool], options: Options = DEFAULT) -> None:
        self._is_recomputed, self._options = is_recomputed, options

    def parts(self, stage: Stage, i: int) -> tuple[list[Part], Replay | None]:
        """The parts of a visit, in the order of their forwards; and what an R replays."""
        frame = Frame(self._options) if self._is_recomputed(stage.number, i) else None
        return [Part(stage, frame)], frame

    def acting(self, action: Action) -> AbstractContextManager[None]:
        """A context around an action."""
        return nullcontext()

    def forwarded(self, j: int, i: int, arrived: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Called behind the forward of a visit whose backward is that of the whole graph."""

    def finish(self) -> None:
        """Called when all actions of a step have run."""
