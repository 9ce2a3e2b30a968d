"""Predict the step time and peak memory of published runs, and say how far off that is.

    python benchmarks/published/predict.py [--rows FILE] [--svg FILE] [--json FILE]
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.published.pairs import Pair, pairs_of  # noqa: E402
from benchmarks.published.picture import drawn  # noqa: E402
from benchmarks.published.runs import Run, read_runs  # noqa: E402


class Error(NamedTuple):
    """One predicted value beside the measured one."""

    run: Run
    measured: float
    predicted: float

    @property
    def share(self) -> float:
        return self.predicted / self.measured - 1


KINDS = ("dense, bf16 and fp16", "fp8", "MoE")
_WITHIN = (0.95, 1.35)


def times(runs: Iterable[Run], kind: str) -> list[Error]:
    """The rows of one kind that have a time and can be predicted."""
    chosen = (run for run in runs if run.kind == kind and run.step_seconds and not run.reason(timed=True))
    return [Error(run, run.step_seconds, run.seconds) for run in chosen]


def memories(runs: Iterable[Run]) -> list[Error]:
    """The rows that print a peak and can be predicted, in GiB. A driver's figure counts the context too."""
    chosen = (run for run in runs if run.measured_gib and not run.reason(timed=False))
    return [Error(run, run.measured_gib, run.memory_gib) for run in chosen]


def quantile(values: Sequence[float], share: float) -> float:
    """Between neighbours, linearly."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (place - low)


def figures(shares: Sequence[float]) -> str:
    """Rows, median and p90 of the absolute error, the median with its sign."""
    if not shares:
        return "   0      -      -       -"
    sizes = [abs(share) * 100 for share in shares]
    return f"{len(shares):4d} {median(sizes):6.1f} {quantile(sizes, 0.9):6.1f}  {median(shares) * 100:+6.1f}"


def by_source(title: str, errors: Sequence[Error]) -> Iterator[str]:
    """The table of one figure, and its worst rows."""
    yield f"\n{title:40s} rows median    p90    bias   (%)"
    for source in sorted({error.run.source_name for error in errors}):
        yield f"  {source:38s} {figures([e.share for e in errors if e.run.source_name == source])}"
    yield f"  {'all':38s} {figures([error.share for error in errors])}"
    for error in sorted(errors, key=lambda error: -abs(error.share))[:5]:
        yield f"    {error.share * 100:+5.0f} %  {error.run.id}: {error.run.remark(timed='time' in title)}"


def of_memory(errors: Sequence[Error]) -> Iterator[str]:
    tight = [e for e in errors if e.run.source_name in ("zb", "vocabpp")]
    tensors = [e for e in errors if e.run.memory_kind == "allocated" and e not in tight]
    named = [e for e in tensors if not e.run.left_out]
    wide = [e for e in errors if e.run.memory_kind in ("reserved", "driver") and e not in tight]
    yield from by_source("memory, Zero Bubble and VocabularyParallel", tight)
    yield from by_source("memory, allocated or active", named)
    for text in sorted({f"{e.run.series}: {e.run.left_out}" for e in tensors if e.run.left_out}):
        yield f"    left out: {text}"
    yield f"  {'with what is left out':38s} {figures([e.share for e in tensors])}"
    yield from by_source("memory, reserved or driver", wide)
    if wide:
        inside = sum(_WITHIN[0] <= e.measured / e.predicted <= _WITHIN[1] for e in wide)
        yield f"  measured / predicted within {_WITHIN[0]} to {_WITHIN[1]}: {inside} of {len(wide)}"


def of_pairs(name: str, pairs: Sequence[Pair]) -> str:
    """Points between the predicted and the measured ratio, and how often the order is right where they differ."""
    points = [pair.predicted - pair.measured for pair in pairs]
    apart = [pair for pair in pairs if abs(pair.measured - 1) > 0.05]
    sure = [pair for pair in pairs if abs(pair.predicted - 1) > 0.1]
    right = [sum(pair.sign_is_right for pair in chosen) for chosen in (apart, sure)]
    return (
        f"  {name:38s} {figures(points)}   order right: {right[0]} of {len(apart)} more than 5 % apart, "
        f"{right[1]} of {len(sure)} where the plan says more than 10 %"
    )


def report(runs: Sequence[Run]) -> Iterator[str]:
    """All tables, line by line."""
    for kind in KINDS:
        yield from by_source(f"step time, {kind}", times(runs, kind))
    yield from of_memory(memories(runs))
    yield f"\n{'ratios of two rows':40s} rows median    p90    bias   (points)"
    for name, pairs in pairs_of(runs).items():
        yield of_pairs(name, pairs)
    yield from best_layouts(runs)
    yield from unpredicted(runs)


def best_layouts(runs: Sequence[Run]) -> Iterator[str]:
    """For each vTrain model on so many GPUs: the step of the layout that is predicted best, over the best measured."""
    yield "\nthe layout of a model that is predicted best, over the best measured"
    errors = [e for e in times(runs, KINDS[0]) if e.run.source_name == "vtrain"]
    groups: dict[tuple[object, ...], list[Error]] = {}
    for error in errors:
        run = error.run
        groups.setdefault((run.model, run.layers, run.gpus, run.global_batch, run.seq_len), []).append(error)
    for (model, _, gpus, batch, _), group in groups.items():
        if len(group) >= 4:
            chosen, best = min(group, key=lambda e: e.predicted), min(group, key=lambda e: e.measured)
            over = (chosen.measured / best.measured - 1) * 100
            yield f"  {f'{model}, {gpus} GPUs, batch {batch}':38s} {len(group):4d} layouts, {over:+.1f} %"


def unpredicted(runs: Sequence[Run]) -> Iterator[str]:
    """The rows without a prediction, counted by reason."""
    for title, timed in (("time", True), ("memory", False)):
        reasons: dict[str, int] = {}
        for run in runs:
            has = run.wrong or (run.step_seconds if timed else run.measured_gib)
            if has and (reason := run.reason(timed=timed)):
                reasons[reason] = reasons.get(reason, 0) + 1
        yield f"\nnot predicted, {title}: {sum(reasons.values())} rows"
        for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
            yield f"  {count:4d}  {reason}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=Path, default=HERE / "rows.json", metavar="FILE", help="default: the project's")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw predicted against measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each row's numbers")
    options = parser.parse_args(arguments)
    runs = read_runs(options.rows)
    print(f"{len(runs)} rows of {options.rows.name}")
    print("\n".join(report(runs)))
    errors = [*times(runs, KINDS[0]), *memories(runs)]
    if options.svg is not None:
        options.svg.write_text(drawn(times(runs, KINDS[0]), memories(runs)), encoding="utf-8")
    if options.json is not None:
        rows = [{"id": e.run.id, "measured": e.measured, "predicted": e.predicted} for e in errors]
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
