"""Fit the six shares of torchckpt's rates on whole series of published runs, each source left out once as a check.

    python benchmarks/published/fit.py [--rows FILE] [--left-out]

The step times of dense runs in bf16 and fp16 are taken, absolute errors of their logarithms, a series of n rows as
root n, and each share with a spread of 30 % around its prior. Nothing is fitted to a single row, and no memory at all.
"""
from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.published.predict import KINDS, figures, times  # noqa: E402
from benchmarks.published.runs import Run, read_runs  # noqa: E402
from torchckpt.planning.rates import RATES, Rates  # noqa: E402

PRIORS = {
    "ampere": 0.80, "hopper": 0.68, "inner": 200.0, "memory": 0.75, "host_seconds": 25e-6, "unhidden": 0.25,
}  # fmt: skip
"""What is known before: of products the clock under load, of memory what vendors' tests of bandwidth reach."""
_SPREAD, _ROUND = 0.3, 0.03


def rates_of(values: Sequence[float]) -> dict[str, Rates]:
    """The rates of all devices for shares in the order of ``PRIORS``, as logarithms."""
    shares = {name: float(np.exp(value)) for name, value in zip(PRIORS, values)}
    ampere, hopper = shares.pop("ampere"), shares.pop("hopper")
    scale = {"a100": ampere / RATES["a100"].product}
    other = hopper / RATES["h100"].product
    return {
        name: replace(rates, product=rates.product * scale.get(name, other), **shares) for name, rates in RATES.items()
    }


def errors_of(runs: Sequence[Run], values: Sequence[float]) -> np.ndarray:
    """Logarithms of predicted over measured."""
    rates = rates_of(values)
    return np.array([np.log(run.with_rates(rates).seconds / run.step_seconds) for run in runs])


def fitted(runs: Sequence[Run], start: np.ndarray, rounds: int) -> np.ndarray:
    """Gauss and Newton's method on absolute errors, by weights that are made anew each round."""
    prior = np.log(list(PRIORS.values()))
    counts = Counter(run.series for run in runs)
    base = np.array([counts[run.series] ** -0.5 for run in runs]) / 0.15

    def loss(errors: np.ndarray, values: np.ndarray) -> float:
        return float((base * np.abs(errors)).sum() + (((values - prior) / _SPREAD) ** 2).sum() / 2)

    values, errors = start, errors_of(runs, start)
    for _ in range(rounds):
        slopes = np.stack([(errors_of(runs, values + d) - errors) / 0.02 for d in 0.02 * np.eye(len(values))], 1)
        weights = base / np.maximum(np.abs(errors), _ROUND)
        matrix = slopes.T @ (weights[:, None] * slopes) + np.eye(len(values)) / _SPREAD**2
        move = -np.linalg.solve(matrix, slopes.T @ (weights * errors) + (values - prior) / _SPREAD**2)
        for part in (1.0, 0.5, 0.25):
            tried = errors_of(runs, values + part * move)
            if loss(tried, values + part * move) < loss(errors, values):
                values, errors = values + part * move, tried
                break
    return values


def shown(name: str, errors: np.ndarray) -> None:
    print(f"{name:24s} {figures([float(value) for value in np.exp(errors) - 1])}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=HERE / "rows.json", metavar="FILE")
    parser.add_argument("--left-out", action="store_true", help="also each source predicted from the others")
    options = parser.parse_args()
    runs = [error.run for error in times(read_runs(options.rows), KINDS[0])]
    prior = np.log(list(PRIORS.values()))
    print(f"{'':24s} rows median    p90    bias   (%)")
    shown("priors, nothing fitted", errors_of(runs, prior))
    values = fitted(runs, prior, 5)
    shown("fitted, in sample", errors_of(runs, values))
    print({name: float(f"{np.exp(value):.3g}") for name, value in zip(PRIORS, values)}, flush=True)
    if options.left_out:
        apart = []
        for source in sorted({run.source_name for run in runs}):
            others = [run for run in runs if run.source_name != source]
            apart.append(errors_of([run for run in runs if run.source_name == source], fitted(others, values, 1)))
            shown(f"without {source}", apart[-1])
        shown("each source left out", np.concatenate(apart))


if __name__ == "__main__":
    main()
