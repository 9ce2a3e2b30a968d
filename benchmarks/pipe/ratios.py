"""Ratios: step times and bytes of a pipeline on one CPU, over those of the plain module."""
from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.pipe.small import BLOCKS, JOBS
from benchmarks.pipe.variants import Job, Variant, variants
from benchmarks.turns import Spread, in_turn, ratios
from examples.gpt.memory import LiveBytes
from torchckpt.testing import count_recomputes

__all__ = ["CELLS", "count", "measure", "show"]

CELLS = [(name, stages, m) for name in JOBS for stages in (2, 4) for m in (4, 8)]


def measure(rounds: int) -> list[dict[str, Any]]:
    """For each cell and variant: its step time over the plain one's, and its counts."""
    rows = []
    for name, stages, m in CELLS:
        contenders = _contenders(JOBS[name](), stages, m)
        seconds = in_turn({variant.name: variant.step for variant in contenders}, rounds)
        plain = seconds[contenders[0].name]
        steps = {name: ratios(values, plain) for name, values in seconds.items()}
        rows.append({**count(name, JOBS[name](), stages, m), "step / plain": steps})
    return rows


def count(name: str, job: Job, stages: int, m: int) -> dict[str, Any]:
    """For each variant: bytes kept from forward to backward, peak bytes of a step, replays, and whether gradients are
    bit-equal to those of the plain variant that adds them in the same order: the last micro-batch first, or in
    ``Pipe.step`` the first."""
    contenders = _contenders(job, stages, m)
    counted = {variant.name: _counted(variant) for variant in contenders}
    gradients = {variant.name: variant.gradients() for variant in contenders}
    equal = {name: all(map(torch.equal, own, gradients[_like(name)])) for name, own in gradients.items()}
    return {
        "model": name,
        "stages": stages,
        "micro-batches": m,
        **{what: {name: own[what] for name, own in counted.items()} for what in ("kept", "peak", "replays")},
        "gradients bit-equal": equal,
    }


def _contenders(job: Job, stages: int, m: int) -> list[Variant]:
    return variants(job, [BLOCKS // stages] * stages, m)


def _like(name: str) -> str:
    """The plain variant that adds up the gradients of micro-batches in the same order."""
    return "plain, accumulated" if name.startswith(("Pipe.step", "plain, accumulated")) else "plain"


def _counted(variant: Variant) -> dict[str, int | None]:
    variant.step()  # the first run of a pipeline works on copies
    variant.forget()
    gc.collect()
    kept = None
    with LiveBytes() as alive, count_recomputes() as replays:
        if variant.forward is None:
            variant.both()
        else:
            loss = variant.forward()
            kept = alive.alive_bytes
            loss.backward()
    return {"kept": kept, "peak": max(alive.curve), "replays": replays.total}


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(f"{row['model']}, {row['stages']} stages, {row['micro-batches']} micro-batches")
        print(f"  {'':26}{'step / plain':>20}{'kept / plain':>14}{'peak / plain':>14}{'replays':>9}   bit-equal")
        print("\n".join(_lines(row)))


def _lines(row: dict[str, Any]) -> Iterator[str]:
    for name, steps in row["step / plain"].items():
        bytes_over = "".join(f"{_over(row[what], name):>14}" for what in ("kept", "peak"))
        equal = "yes" if row["gradients bit-equal"][name] else "no"
        yield f"  {name:26}{Spread(*steps)!s:>20}{bytes_over}{row['replays'][name]:9}   {equal}"


def _over(counts: dict[str, int | None], name: str) -> str:
    own, plain = counts[name], counts["plain"]
    return "-" if own is None or plain is None else f"{own / plain:.3f}"
