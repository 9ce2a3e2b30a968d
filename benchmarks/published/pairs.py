"""Pairs: two rows of a series that differ in one thing."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.published.runs import Run

__all__ = ["Pair", "pairs_of"]

_SAME = ("model", "layers", "seq_len", "gpu", "gpus", "precision", "global_batch", "compile")
_LEVELS = {"none": 0, "products": 1, "core_attn": 2, "full": 3}


class Pair(NamedTuple):
    """The seconds of the first row over those of the second."""

    first: Run
    second: Run
    measured: float
    predicted: float

    @property
    def sign_is_right(self) -> bool:
        return (self.measured > 1) == (self.predicted > 1)


def pairs_of(runs: Sequence[Run]) -> dict[str, list[Pair]]:
    """Dense rows side by side, by what they differ in."""
    rows = [run for run in runs if run.kind != "MoE" and run.time_or_mfu and not run.reason(timed=True)]
    rows = [run for run in rows if run.global_batch and run.microbatches_per_step]
    pairs = [_pair(a, b) for a in rows for b in rows if a is not b and _comparable(a, b)]
    tensor = [pair for pair in pairs if _more_tensor(pair.first, pair.second)]
    alike = [pair for pair in tensor if _same(pair.first, pair.second, ("dp", "micro_batch"))]
    return {
        "full against selective or none": [p for p in pairs if _more_recompute(p.first, p.second)],
        "schedule against 1F1B": [p for p in pairs if _other_schedule(p.first, p.second)],
        "TP against PP, same DP and micro-batch": alike,
        "TP against PP, any": tensor,
    }


def _same(first: Run, second: Run, names: Iterable[str]) -> bool:
    return all(first.row[name] == second.row[name] for name in names)


def _comparable(first: Run, second: Run) -> bool:
    return (
        first.series == second.series
        and _same(first, second, _SAME)
        and bool(first.step_seconds) == bool(second.step_seconds)
    )


def _pair(first: Run, second: Run) -> Pair:
    return Pair(first, second, first.time_or_mfu / second.time_or_mfu, first.seconds / second.seconds)


def _level(run: Run) -> tuple[int, float]:
    layout = run.layout
    name = layout.software.selective[0] if layout.recompute == "selective" else layout.recompute
    return _LEVELS.get(name, 2), layout.recomputed_share


def _more_recompute(first: Run, second: Run) -> bool:
    same = _same(first, second, ("tp", "pp", "dp", "micro_batch", "schedule"))
    return same and _level(first) > _level(second) and first.source_name != "torchtune"


def _other_schedule(first: Run, second: Run) -> bool:
    same = _same(first, second, ("tp", "dp", "pp", "recompute"))
    return same and second.schedule == "1f1b" != first.schedule


def _more_tensor(first: Run, second: Run) -> bool:
    more = first.layout.tp > second.layout.tp and first.layout.pp < second.layout.pp
    return more and first.recompute == second.recompute and abs(first.time_or_mfu / second.time_or_mfu - 1) > 0.1
