"""Scale: the unit in which a number is short."""
from __future__ import annotations

from torchckpt.model.draw.units import Units

__all__ = ["memory_units", "prefix"]

_PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def prefix(largest: float) -> tuple[str, float]:
    """The decimal prefix of which ``largest`` has at least one, and what it stands for.

    >>> prefix(14_263_816)
    ('M', 1000000.0)
    """
    return next(((letter, factor) for letter, factor in _PREFIXES if largest >= factor), ("", 1.0))


def memory_units(largest_bytes: float, time: str = "", seconds: float = 1.0) -> Units:
    """B, kB, MB, GB or TB, after the largest number to be written; ``time`` and ``seconds`` as in ``Units``.

    >>> memory_units(57_900_000).of_memory(14_263_816)
    '14.26 MB'
    """
    letter, factor = prefix(largest_bytes)
    return Units(time, seconds, f"{letter}B", factor)
