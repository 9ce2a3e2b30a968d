"""Counts: checks of numbers of stages, ranks, chunks and micro-batches."""
from __future__ import annotations

from collections.abc import Callable

from torchckpt.errors import Fault, brief

__all__ = ["at_least", "nearest", "whole"]


def whole(name: str, value: object) -> list[Fault]:
    """A fault unless ``value`` is an integer of 1 or more."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return []
    return [Fault(f"{name} is an integer >= 1", f"{name}={brief(value)}", f"{name}=1")]


def at_least(schedule: str, name: str, value: int, other_name: str, other: int, factor: int = 1) -> list[Fault]:
    """Faults unless both are integers of 1 or more, and ``value >= factor * other``."""
    faults = [*whole(other_name, other), *whole(name, value)]
    if faults or value >= factor * other:
        return faults
    times = f"{factor} " if factor > 1 else ""
    received = f"{name}={value}, {other_name}={other}"
    works = f"{name}={factor * other}, the nearest"
    return [Fault(f"{schedule} needs {name} >= {times}{other_name}", received, works)]


def nearest(value: int, works: Callable[[int], bool]) -> int:
    """The number nearest to ``value`` for which ``works`` is true; of two equally near numbers, the larger."""
    return next(n for distance in range(value) for n in (value + distance, value - distance) if works(n))
