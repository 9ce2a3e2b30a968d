"""Budget: convert the memory budget that a user wrote for one step into bytes."""
from __future__ import annotations

import math
from dataclasses import replace
from numbers import Integral
from typing import TypeAlias

from torchckpt.errors import Fault, raise_faults
from torchckpt.model.amount import UNITS, Amount, read, trouble

__all__ = ["Budget", "budget_bytes", "check_budget", "typed", "written"]

Budget: TypeAlias = "str | int | float"
"""A size such as ``"6GiB"`` or ``"100 MB"``; bytes, if an int; a share of the eager step's peak: ``"50%"``, ``0.5``."""


def check_budget(caller: str, budget: Budget) -> None:
    """Raise an ArgumentError unless ``budget`` is a size, a positive number of bytes, or a share in (0, 1]."""
    raise_faults(caller, [] if _amount(budget) else [_fault(budget)])


def budget_bytes(budget: Budget, eager_peak_bytes: int) -> int:
    """Bytes, rounded down.

    >>> budget_bytes("1.5 KiB", 0), budget_bytes(0.4, 1000), budget_bytes("50%", 1000)
    (1536, 400, 500)
    """
    amount = _amount(budget)
    if amount is None:
        raise_faults("budget_bytes()", [_fault(budget)])
        return 0
    return math.floor(amount.of(eager_peak_bytes))


def typed(budget: Budget) -> str:
    """As the user wrote it: ``"50%"``, ``"0.4"``, ``"6GiB"``."""
    return str(budget).strip()


def written(amount_bytes: int) -> str:
    """The amount rounded up in a unit in which it is a budget: ``"14.27MB"``."""
    unit = next((unit for unit in ("GB", "MB", "kB") if amount_bytes >= UNITS[unit]), "B")
    whole, hundredths = divmod(-(-amount_bytes * 100 // UNITS[unit]), 100)
    return f"{whole}.{hundredths:02}".rstrip("0").rstrip(".") + unit


def _amount(budget: object) -> Amount | None:
    """The amount of a valid budget, else None. A float is a share."""
    amount = read(budget)
    if amount is not None and not isinstance(budget, (str, Integral)):
        amount = replace(amount, is_share=True)
    return None if amount is None or (amount.is_share and amount.number > 1) else amount


def _fault(budget: object) -> Fault:
    rule = (
        f"a budget is a size with one of the units {', '.join(UNITS)}; or bytes, as an int; or a share of eager's peak"
        ' up to all of it: "40%" or, as a float, 0.4'
    )
    works = 'budget="6GiB", budget=6 * 2**30, budget="40%", budget=0.4'
    amount = read(budget)
    if amount is None:
        return Fault(rule, trouble(budget), works)
    if isinstance(budget, str):
        return Fault(rule, f"{budget!r} (more than all of it)", works)
    whole = amount.number.denominator == 1 and amount.number > 100
    works = f'budget={int(amount.number)}, as an int, or {works}' if whole else works
    return Fault(rule, f"{budget!r} (a float is a share, and this one more than all of it)", works)
