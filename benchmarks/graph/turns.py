"""Turns: what is compared takes turns in each round, so that whatever else the machine does slows each alike."""
from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

from benchmarks.devices import synchronize

__all__ = ["Spread", "in_turn", "ratios", "spread"]


class Spread(NamedTuple):
    """Of the values of all rounds."""

    p10: float
    median: float
    p90: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.p10:.2f} to {self.p90:.2f})"


def spread(values: Sequence[float]) -> Spread:
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [*values] * 9
    return Spread(tenths[0], statistics.median(values), tenths[-1])


def in_turn(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds per round of each of ``runs``, after a round of warm-up. Every other round goes backwards."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for place in range(rounds + 1):
        gc.collect()
        for name in [*runs] if place % 2 else [*runs][::-1]:
            synchronize()
            begin = perf_counter()
            runs[name]()
            synchronize()
            seconds[name].append(perf_counter() - begin)
    return {name: values[1:] for name, values in seconds.items()}


def ratios(seconds: Mapping[str, Sequence[float]], under: str) -> dict[str, Spread]:
    """Of each to ``under``, taken within a round."""
    return {name: spread([a / b for a, b in zip(values, seconds[under])]) for name, values in seconds.items()}
