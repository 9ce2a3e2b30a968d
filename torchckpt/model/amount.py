"""Amount: parse a memory size or share that a user wrote, such as ``"6GiB"`` or ``"50%"``."""
from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real

__all__ = ["UNITS", "Amount", "read", "trouble"]

UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}
_BY_CAPITALS = {unit.upper(): amount for unit, amount in UNITS.items()}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_SIZE, _SHARE = re.compile(rf"\s*{_NUMBER}\s*([A-Za-z]+)\s*"), re.compile(rf"\s*{_NUMBER}\s*%\s*")
_BARE = re.compile(rf"\s*{_NUMBER}\s*")


@dataclass(frozen=True)
class Amount:
    """Bytes, or a share of a peak that is not known yet. ``typed`` is the text that the user wrote.

    >>> read("50%").of(8000), read("1.5 KiB").of(8000), read(2000).of(8000)
    (Fraction(4000, 1), Fraction(1536, 1), Fraction(2000, 1))
    """

    typed: str
    number: Fraction
    is_share: bool = False

    def of(self, peak_bytes: float) -> Fraction:
        """The amount in bytes. A share is a share of ``peak_bytes``."""
        return self.number * Fraction(peak_bytes) if self.is_share else self.number


def read(written: object) -> Amount | None:
    """The amount for a size with a unit, a share in percent, or a number (also NumPy's). None if it is invalid or not
    above zero.

    A number means bytes here. :mod:`~torchckpt.model.remat.budget` reads a float as a share instead.
    """
    if isinstance(written, str):
        return _read_text(written)
    if isinstance(written, bool) or not isinstance(written, (Integral, Real)) or not _is_finite(written):
        return None
    number = Fraction(int(written)) if isinstance(written, Integral) else Fraction(repr(float(written)))  # as typed
    return Amount(str(written), number) if number > 0 else None


def trouble(written: object) -> str:
    """The invalid value and the reason, such as ``'6' (it has no unit)``."""
    reason = ""
    if isinstance(written, str):
        unit = _SIZE.fullmatch(written)
        if _BARE.fullmatch(written):
            reason = "it has no unit"
        elif unit and unit[2].upper() not in _BY_CAPITALS:
            reason = f"{unit[2]} is not a unit"
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
    return Amount(text.strip(), number, share is not None) if number > 0 else None


def _is_finite(number: Real | Integral) -> bool:
    return isinstance(number, Integral) or math.isfinite(float(number))
