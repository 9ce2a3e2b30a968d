"""Units: how times and memory are written for people."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchckpt.model.action import Action
from torchckpt.model.schedule import Schedule

__all__ = ["Units", "aligned", "label", "number", "percent", "row_name"]


@dataclass(frozen=True)
class Units:
    """What one unit of time and of memory is, and its name. By default times are bare numbers, memory counts in A.

    >>> Units(time="ms", seconds=1e-3).of_time(0.0425)
    '42.5 ms'
    """

    time: str = ""
    seconds: float = 1.0
    memory: str = "A"
    bytes: float = 1.0

    def of_time(self, seconds: float) -> str:
        return f"{number(seconds / self.seconds)} {self.time}".rstrip()

    def of_memory(self, amount_bytes: float) -> str:
        return f"{number(amount_bytes / self.bytes)} {self.memory}".rstrip()


def number(value: float) -> str:
    """At most four significant digits, in full up to a million: ``33``, ``0.25``, ``1234``."""
    if 1e3 <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.4g}"


def percent(share: float) -> str:
    """``0.125`` is ``12.5 %``."""
    return f"{share * 100 + 0.0:.1f} %".replace("-0.0", "0.0")


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells in columns: the first on the left of its column, the others on the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:]))
        lines.append("  ".join((first.ljust(widths[0]), *cells)).rstrip())
    return "\n".join(lines)


def row_name(schedule: Schedule, rank: int) -> str:
    """``stage 3``; ``rank 3`` where a rank holds several stages, or not the stage of its number."""
    return f"stage {rank}" if _is_one_stage_a_rank(schedule) else f"rank {rank}"


def label(schedule: Schedule, action: Action) -> str:
    """``F3``; ``0F3`` where the row does not say the stage."""
    return f"{action.kind}{action.micro_batch}" if _is_one_stage_a_rank(schedule) else str(action)


def _is_one_stage_a_rank(schedule: Schedule) -> bool:
    return schedule.placement == tuple(range(len(schedule.ranks)))
