"""Turns: what is compared takes turns in each round, so that whatever else the machine does slows each alike."""
from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

__all__ = ["Spread", "in_turn", "ratios", "spread"]


class Spread(NamedTuple):
    """Of the values of all rounds."""

    p10: float
    median: float
    p90: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.p10:.2f}-{self.p90:.2f})"


def spread(values: Sequence[float]) -> Spread:
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [*values] * 9
    return Spread(tenths[0], statistics.median(values), tenths[-1])


def in_turn(
    runs: Mapping[str, Callable[[], Any]], rounds: int, calls: int = 1, wait: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Seconds a call, per round, of each of ``runs``, after two rounds of warm-up.

    Args:
        calls: made one after the other, and timed together.
        wait: returns when the devices have done what they were given.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(2 + rounds):
        gc.collect()
        for name, run in runs.items():
            wait()
            begin = perf_counter()
            for _ in range(calls):
                run()
            wait()
            seconds[name].append((perf_counter() - begin) / calls)
    return {name: values[2:] for name, values in seconds.items()}


def ratios(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Taken within a round."""
    return spread([a / b for a, b in zip(over, under)])
