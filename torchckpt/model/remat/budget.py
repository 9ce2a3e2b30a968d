"""Budget: what a user writes for an amount of memory, in bytes."""
from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import TypeAlias

from torchckpt.errors import Fault, raise_faults

__all__ = ["Budget", "budget_bytes", "check_budget", "written"]

Budget: TypeAlias = "str | int | float"
"""A size such as ``"6GiB"`` or ``"100 MB"``; bytes, if an int; a share of the eager step's peak, if a float."""

_UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}
_BY_CAPITALS = {unit.upper(): amount for unit, amount in _UNITS.items()}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)\s*")


def check_budget(caller: str, budget: Budget) -> None:
    """Raise an ArgumentError unless ``budget`` is a size, a positive number of bytes, or a share in (0, 1]."""
    if not _is_budget(budget):
        units = ", ".join(_UNITS)
        rule = (
            f"a budget is a size with one of the units {units}; or bytes, as an int; or a share of eager's peak in"
            " (0, 1], as a float"
        )
        raise_faults(caller, [Fault(rule, repr(budget), 'budget="6GiB", budget=6 * 2**30, budget=0.4')])


def budget_bytes(budget: Budget, eager_peak_bytes: int) -> int:
    """Bytes, rounded down.

    >>> budget_bytes("1.5 KiB", 0), budget_bytes(0.4, 1000)
    (1536, 400)
    """
    check_budget("budget_bytes()", budget)
    if isinstance(budget, str):
        found = _SIZE.fullmatch(budget)
        return math.floor(Fraction(found[1]) * _BY_CAPITALS[found[2].upper()]) if found else 0
    return budget if isinstance(budget, int) else math.floor(budget * eager_peak_bytes)


def written(amount_bytes: int) -> str:
    """The amount rounded up in a unit in which it is a budget: ``"14.27MB"``."""
    unit = next((unit for unit in ("GB", "MB", "kB") if amount_bytes >= _UNITS[unit]), "B")
    whole, hundredths = divmod(-(-amount_bytes * 100 // _UNITS[unit]), 100)
    return f"{whole}.{hundredths:02}".rstrip("0").rstrip(".") + unit


def _is_budget(budget: object) -> bool:
    if isinstance(budget, str):
        found = _SIZE.fullmatch(budget)
        return found is not None and found[2].upper() in _BY_CAPITALS and float(found[1]) > 0
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        return False
    return budget > 0 and (isinstance(budget, int) or budget <= 1)
