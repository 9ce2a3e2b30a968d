"""Budget: convert the memory budget that a user wrote for one step into bytes."""
from __future__ import annotations

import math
from fractions import Fraction

from torchckpt.model.amount import UNITS, Budget, read_budgets

__all__ = ["Budget", "budget_bytes", "check_budget", "typed", "written"]

_ALL = Fraction(1)


def check_budget(caller: str, budget: Budget) -> None:
    """Raise an ArgumentError unless ``budget`` is a size, a number of bytes, or a share up to all of the eager peak."""
    read_budgets(caller, {"budget": budget}, _ALL)


def budget_bytes(budget: Budget, eager_peak_bytes: int) -> int:
    """Bytes, rounded down.

    >>> budget_bytes("1.5 KiB", 0), budget_bytes(2e9, 0), budget_bytes("50%", 1000)
    (1536, 2000000000, 500)
    """
    (amount,) = read_budgets("budget_bytes()", {"budget": budget}, _ALL)
    return math.floor(amount.of(eager_peak_bytes))


def typed(budget: Budget) -> str:
    """As the user wrote it: ``"50%"``, ``"6GiB"``."""
    return str(budget).strip()


def written(amount_bytes: int) -> str:
    """The amount rounded up in a unit in which it is a budget: ``"14.27MB"``."""
    unit = next((unit for unit in ("GB", "MB", "kB") if amount_bytes >= UNITS[unit]), "B")
    whole, hundredths = divmod(-(-amount_bytes * 100 // UNITS[unit]), 100)
    return f"{whole}.{hundredths:02}".rstrip("0").rstrip(".") + unit
