"""Labels: place names in a picture so that no two overlap."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torchckpt.planning.draw.units import Units

__all__ = ["Label", "beside", "memory_units", "prefix", "spread"]

class Label(NamedTuple):
    """A name that wants to stand around ``place`` and is ``extent`` long; of two that touch, the heavier stays."""

    name: str
    place: float
    extent: float
    weight: float


def beside(wanted: Sequence[Label], start: float, end: float) -> list[Label]:
    """Those that have room beside one another between ``start`` and ``end``, the heaviest first."""
    found: list[Label] = []
    for label in sorted(wanted, key=lambda label: -label.weight):
        half = label.extent / 2
        moved = label._replace(place=max(start + half, min(label.place, end - half)))
        if all(abs(moved.place - other.place) >= half + other.extent / 2 for other in found):
            found.append(moved)
    return found


def spread(places: Sequence[float], pitch: float, end: float) -> list[float]:
    """As near to ``places``, which ascend, as keeps each ``pitch`` from the next, and none beyond ``end``.

    >>> spread([10, 50, 52, 90], pitch=14, end=100)
    [10.0, 44.0, 58.0, 90.0]
    """
    groups: list[list[float]] = []
    for place in places:
        groups.append([place])
        while len(groups) > 1 and _lines(groups[-2], pitch, end)[-1] + pitch > _lines(groups[-1], pitch, end)[0]:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [line for group in groups for line in _lines(group, pitch, end)]


def _lines(group: Sequence[float], pitch: float, end: float) -> list[float]:
    height = pitch * (len(group) - 1)
    first = min(sum(group) / len(group) - height / 2, end - height)
    return [first + pitch * index for index in range(len(group))]


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
