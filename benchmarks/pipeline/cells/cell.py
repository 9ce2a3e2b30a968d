"""Cell: one pipeline of the result table, and its simulation, without torch."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from torchckpt.planning import (
    Block,
    Link,
    Schedule,
    Stage,
    ahead,
    arrival,
    bound,
    exempt,
    gpipe,
    one_f_one_b,
    simulate,
    with_recompute,
)

__all__ = ["FULL", "NAMED", "Cell", "Prediction", "predict"]

_MAKE = {"gpipe": gpipe, "1f1b": one_f_one_b}
_EXEMPT = {"gpipe": "first_backward", "1f1b": "last_stage"}


@dataclass(frozen=True)
class Cell:
    """``p`` stages, one in each process, and ``m`` micro-batches. A message takes ``tc`` times a forward."""

    schedule: str
    p: int
    m: int
    tc: float

    @classmethod
    def of(cls, name: str) -> Cell:
        """The cell with a name such as ``1f1b-4-16-0.25``."""
        schedule, p, m, tc = name.split("-")
        return cls(schedule, int(p), int(m), float(tc))

    def __str__(self) -> str:
        return f"{self.schedule}-{self.p}-{self.m}-{self.tc:g}"

    @cached_property
    def plain(self) -> Schedule:
        return _MAKE[self.schedule](self.p, self.m)

    @cached_property
    def bounded(self) -> Schedule:
        """What the bound counts. ``exempt="auto"`` also keeps the first micro-batch of each stage of 1F1B: that lowers
        the bound by a recompute, but shortens no step, for the rank would have been idle then."""
        return with_recompute(self.plain, exempt(self.plain, ahead(self.plain), _EXEMPT[self.schedule]))


FULL = tuple(
    Cell(schedule, p, factor * p, tc)
    for p, schedule, factor, tc in product((2, 4, 8), ("gpipe", "1f1b"), (1, 2, 4), (0.0, 0.25, 1.0))
)
NAMED = tuple(map(Cell.of, ("1f1b-2-2-0", "1f1b-4-4-0", "1f1b-4-16-1", "1f1b-8-8-0")))
"""The cells with a required ratio; torch's own schedule classes are measured in them, too."""


@dataclass(frozen=True)
class Prediction:
    """Simulated seconds per step, by variant."""

    none: float
    stock: float
    ours: float
    bound_seconds: float
    """The least time that recomputation adds to a step without it; see :attr:`Cell.bounded`."""

    @property
    def hidden(self) -> float:
        return 1 - (self.ours - self.none) / (self.stock - self.none)


def predict(cell: Cell, ours: Schedule, costs: Sequence[Block | Stage], links: Sequence[Link]) -> Prediction:
    pairs = (cell.plain, None), (cell.plain, arrival(cell.plain)), (ours, None)
    steps = (simulate(schedule, costs, links, choices, exposed=False).step_seconds for schedule, choices in pairs)
    return Prediction(*steps, bound(cell.bounded, costs, links).overhead_seconds)
