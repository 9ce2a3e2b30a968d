"""Budget: the one reader of memory sizes, shares and budgets that a user wrote, such as ``"6GiB"`` or ``"50%"``."""
from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from typing import TypeAlias, TypeGuard

from torchckpt.errors import Fault, check, raise_fault

__all__ = [
    "UNITS", "WORKS", "Amount", "Budget", "Bytes", "DeviceMemory", "Limit", "budget_bytes", "bytes_per_rank",
    "check_budget", "enough", "read", "read_budgets", "trouble", "typed", "whole", "written",
]

Budget: TypeAlias = "str | float"
"""Bytes, a size such as ``"60GB"``, or ``"50%"`` of what is held when everything is kept."""

WORKS = 'budget="60GB", budget="50%", budget=6e10'
"""Budgets, for messages."""

UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}
_BY_CAPITALS = {unit.upper(): amount for unit, amount in UNITS.items()}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_SIZE, _SHARE = re.compile(rf"\s*{_NUMBER}\s*([A-Za-z]+)\s*"), re.compile(rf"\s*{_NUMBER}\s*%\s*")
_BARE = re.compile(rf"\s*{_NUMBER}\s*")
_WHOLE_FROM = 1000.0
"""Plans on paper may count in a unit of their own: an amount below this is written with its fraction."""


@dataclass(frozen=True)
class Amount:
    """Bytes, or a share of a peak that is not known yet.

    >>> read("50%").of(8000), read("1.5 KiB").of(8000), read(2000).of(8000)
    (Fraction(4000, 1), Fraction(1536, 1), Fraction(2000, 1))
    """

    number: Fraction
    is_share: bool = False

    def of(self, peak_bytes: float) -> Fraction:
        """The amount in bytes. A share is a share of ``peak_bytes``."""
        return self.number * Fraction(peak_bytes) if self.is_share else self.number


def read(written: object) -> Amount | None:
    """The amount for a size with a unit, a share in percent, or a number of bytes (also NumPy's), at least one. None if
    it is invalid or not above zero. A number below 1 is none, for it may have been meant as a share.
    """
    if isinstance(written, str):
        return _read_text(written)
    if isinstance(written, bool) or not isinstance(written, (Integral, Real)):
        return None
    if not isinstance(written, Integral) and not math.isfinite(written):
        return None
    number = Fraction(int(written)) if isinstance(written, Integral) else Fraction(repr(float(written)))  # as typed
    return Amount(number) if number >= 1 else None


def read_budgets(budgets: Mapping[str, object], most: Fraction | None = None) -> list[Amount]:
    """The amounts of ``budgets``, by name; an ArgumentError says what is wrong with each. ``most``: of a share, such as
    1. Default: any."""
    amounts = {name: read(written) for name, written in budgets.items()}
    faults = [_fault(name, budgets[name], amount, most) for name, amount in amounts.items()]
    check([fault for fault in faults if fault])
    return [amount for amount in amounts.values() if amount]


def _fault(name: str, written: object, amount: Amount | None, most: Fraction | None) -> Fault | None:
    received, works = f"{name}={trouble(written)}", WORKS
    if amount is not None and amount.number <= sys.float_info.max:
        if most is None or not amount.is_share or amount.number <= most:
            return None
        received += " (more than all of it)"
    elif _is_below_one(written):
        works = f'budget="{float(written) * 100:g}%", or {works}'
    rule = "the budget is not bytes above 0, a size with a unit such as kB, MiB or GB, or a share in percent"
    return Fault(rule, received, works)


def trouble(written: object) -> str:
    """The invalid value and the reason, such as ``'6' (it has no unit)``."""
    reason = ""
    if isinstance(written, str):
        unit = _SIZE.fullmatch(written)
        if _BARE.fullmatch(written):
            reason = "it has no unit"
        elif unit and unit[2].upper() not in _BY_CAPITALS:
            reason = f"{unit[2]} is not a unit"
    elif _is_below_one(written):
        reason = "less than a byte; a share is text"
    elif not isinstance(written, (bool, Integral, Real)) and written is not None:
        reason = f"a {type(written).__name__}"
    return f"{written!r} ({reason})" if reason else repr(written)


def _read_text(text: str) -> Amount | None:
    share, size = _SHARE.fullmatch(text), _SIZE.fullmatch(text)
    if share:
        number = Fraction(share[1]) / 100
    elif size and size[2].upper() in _BY_CAPITALS:
        number = Fraction(size[1]) * _BY_CAPITALS[size[2].upper()]
    else:
        return None
    return Amount(number, share is not None) if number > 0 else None


def _is_below_one(written: object) -> TypeGuard[Real]:
    return isinstance(written, Real) and not isinstance(written, Integral) and 0 < float(written) < 1


def whole(amount_bytes: float) -> str:
    """At most so many bytes, for people. There are no parts of a byte; few may be of another unit.

    >>> whole(15800217.6), enough(15800217.6), whole(0.06)
    ('15800217', '15800218', '0.06')
    """
    return f"{math.floor(amount_bytes)}" if amount_bytes >= _WHOLE_FROM else f"{amount_bytes:.12g}"


def enough(amount_bytes: float) -> str:
    """At least so many bytes, as :func:`whole` writes them: who gives what an error asks for has enough."""
    return whole(math.ceil(amount_bytes) if amount_bytes >= _WHOLE_FROM else amount_bytes)


@dataclass(frozen=True)
class DeviceMemory:
    """All memory of each rank: its budget is what parameters, gradients and optimizer state leave of it."""

    total_bytes: float


Bytes: TypeAlias = "Budget | Sequence[Budget]"
"""A budget for every rank, or a list with one for each: bytes, a size such as ``"60GB"``, or ``"50%"`` of the peak of
the rank that holds most when all is kept."""

Limit: TypeAlias = "Bytes | DeviceMemory"
"""Budgets, or what devices have in all."""


def bytes_per_rank(limit: Bytes, ranks: int, peak_bytes: float) -> tuple[float, ...]:
    """The budget of each rank in bytes; ``peak_bytes`` are 100%. An ArgumentError, if a budget is not a size, is not
    above zero, is a number below 1, or their number differs from the number of ranks.

    >>> bytes_per_rank(["50%", "1kB"], 2, 8000.0)
    (4000.0, 1000.0)
    """
    if isinstance(limit, (str, Real)):
        amounts = read_budgets({"budget": limit}) * ranks
    elif isinstance(limit, Sequence) and len(limit) == ranks:
        amounts = read_budgets({f"budget[{rank}]": budget for rank, budget in enumerate(limit)})
    else:
        received = f"{len(limit)} budgets" if isinstance(limit, Sequence) else f"budget={limit!r}"
        works = f"{WORKS}, or a list with one for each rank"
        raise_fault(Fault(f"the budget is neither one for every rank nor a list of {ranks}", received, works))
    return tuple(float(amount.of(peak_bytes)) for amount in amounts)


_ALL = Fraction(1)


def check_budget(budget: Budget) -> None:
    """Raise an ArgumentError unless ``budget`` is a size, a number of bytes, or a share up to all of the eager peak."""
    read_budgets({"budget": budget}, _ALL)


def budget_bytes(budget: Budget, eager_peak_bytes: int) -> int:
    """Bytes, rounded down.

    >>> budget_bytes("1.5 KiB", 0), budget_bytes(2e9, 0), budget_bytes("50%", 1000)
    (1536, 2000000000, 500)
    """
    (amount,) = read_budgets({"budget": budget}, _ALL)
    return math.floor(amount.of(eager_peak_bytes))


def typed(budget: Budget) -> str:
    """The budget as the user wrote it: ``"50%"``, ``"6GiB"``."""
    return str(budget).strip()


def written(amount_bytes: int) -> str:
    """The amount rounded up in a unit in which it is a budget: ``"14.27MB"``."""
    unit = next((unit for unit in ("GB", "MB", "kB") if amount_bytes >= UNITS[unit]), "B")
    whole, hundredths = divmod(-(-amount_bytes * 100 // UNITS[unit]), 100)
    return f"{whole}.{hundredths:02}".rstrip("0").rstrip(".") + unit
