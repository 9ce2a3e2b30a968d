"""Turns: the compared variants run one after the other in each round, so that other load slows all of them alike."""
from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

from benchmarks.devices import synchronize

__all__ = ["Spread", "in_turn", "quartiles", "ratios", "spread"]


class Spread(NamedTuple):
    """Median, 10th and 90th percentile of the values of all rounds."""

    p10: float
    median: float
    p90: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.p10:.2f} to {self.p90:.2f})"


def spread(values: Sequence[float]) -> Spread:
    tenths = _cuts(values, 10)
    return Spread(tenths[0], statistics.median(values), tenths[-1])


def quartiles(values: Sequence[float]) -> list[float]:
    return _cuts(values, 4)


def _cuts(values: Sequence[float], n: int) -> list[float]:
    return statistics.quantiles(values, n=n, method="inclusive") if len(values) > 1 else [*values] * (n - 1)


def in_turn(
    runs: Mapping[str, Callable[[], object]], rounds: int, calls: int = 1, warm_up: int = 2
) -> dict[str, list[float]]:
    """Seconds per call of each of ``runs``, for each round, after ``warm_up`` rounds. Every other round is reversed.

    Args:
        calls: made one after the other, and timed together, until all devices have done what they were given.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(warm_up + rounds):
        gc.collect()
        for name in [*runs] if turn % 2 else [*runs][::-1]:
            synchronize()
            begin = perf_counter()
            for _ in range(calls):
                runs[name]()
            synchronize()
            seconds[name].append((perf_counter() - begin) / calls)
    return {name: values[warm_up:] for name, values in seconds.items()}


def ratios(over: Sequence[float], under: Sequence[float]) -> Spread:
    """The ratio of two variants in each round."""
    return spread([a / b for a, b in zip(over, under)])
