"""Units: how times and memory are written for people."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchckpt.planning.order.schedule import Action, Schedule

__all__ = [
    "KIND_NAMES", "Units", "aligned", "label", "number", "percent", "prefix", "row_name", "units_for", "units_of_bytes",
    "units_of_clock",
]

KIND_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "R": "recompute"}
"""What pictures and traces call an action, by the letter of its kind."""

_PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_BARE = 1e5
"""Amounts of memory below this many are in units of the caller's own."""


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
    digits: int = 4
    """The most significant digits that are written."""
    many: str = ""
    """The name of several units of memory, if it is another one."""

    def of_time(self, seconds: float) -> str:
        return f"{number(seconds / self.seconds, self.digits)} {self.time}".rstrip()

    def of_memory(self, amount_bytes: float) -> str:
        amount = number(amount_bytes / self.bytes, self.digits)
        return f"{amount} {self.memory if amount == '1' else self.many or self.memory}".rstrip()


def units_for(most_bytes: float, memory: str = "A") -> Units:
    """Bytes and milliseconds where memory is large; else memory in ``memory``, and time as a bare number.

    >>> units_for(2.5e6).of_memory(2.5e6), units_for(3).of_memory(3)
    ('2.5 MB', '3 A')
    """
    return Units(memory=memory) if most_bytes < _BARE else units_of_bytes(most_bytes)


def units_of_clock(most: float) -> Units:
    """The units for times that were measured: milliseconds, whatever memory counts in; see :func:`units_for`."""
    return replace(units_for(most), time="ms", seconds=1e-3)


def units_of_bytes(most_bytes: float, time: str = "ms", seconds: float = 1e-3) -> Units:
    """Bytes, however few, with the prefix of the largest amount to be written; by default with milliseconds.

    >>> units_of_bytes(704).of_memory(704), units_of_bytes(57_900_000).of_memory(14_263_816)
    ('704 B', '14.26 MB')
    """
    letter, factor = prefix(most_bytes)
    return Units(time, seconds, f"{letter}B", factor)


def prefix(largest: float) -> tuple[str, float]:
    """The decimal prefix of which ``largest`` has at least one, and what it stands for.

    >>> prefix(14_263_816)
    ('M', 1000000.0)
    """
    return next(((letter, factor) for letter, factor in _PREFIXES if largest >= factor), ("", 1.0))


def number(value: float, digits: int = 4) -> str:
    """``value`` with at most ``digits`` significant digits, in full up to a million: ``33``, ``0.25``, ``1234``."""
    if 10 ** (digits - 1) <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


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
    """``stage 3``; ``rank 3`` where a rank holds several stages, or not the stage of its number; ``device`` where one
    holds all."""
    if _is_one_stage_a_rank(schedule):
        return f"stage {rank}"
    return f"rank {rank}" if len(schedule.ranks) > 1 else "device"


def label(schedule: Schedule, action: Action) -> str:
    """``F3``; ``0F3`` where the row does not say the stage."""
    return f"{action.kind}{action.micro_batch}" if _is_one_stage_a_rank(schedule) else str(action)


def _is_one_stage_a_rank(schedule: Schedule) -> bool:
    return schedule.placement == tuple(range(len(schedule.ranks)))
