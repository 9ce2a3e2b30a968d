"""The short version: counts of small models on a CPU, without seconds, printed as JSON.

    python benchmarks/pipe/short.py
"""
from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from benchmarks.pipe import gpu, machinery, ratios
from benchmarks.pipe.large import SMALL
from benchmarks.pipe.small import JOBS
from benchmarks.pipe.variants import Variant
from benchmarks.turns import Spread
from torchckpt.pipe.run import links
from torchckpt.testing import count_recomputes


def count_large() -> dict[str, dict[str, Any]]:
    """For small versions of the GPU benchmark's models and variants: replays, and bit-equality of gradients."""
    found: dict[str, dict[str, Any]] = {}
    for name, job_of in SMALL.items():
        cell = gpu.Cell.of(job_of("cpu"), 2, 4, ["cpu"])
        made = {variant: make() for variant, make in gpu.variants_of(cell, skips=name == "U-Net").items()}
        replays = {variant: _replays(one) for variant, one in made.items()}
        plain = made["Pipe, never"].gradients()
        equal = {variant: all(map(torch.equal, one.gradients(), plain)) for variant, one in made.items()}
        found[name] = {"replays": replays, "equal to never": [variant for variant in equal if equal[variant]]}
    return found


def _replays(variant: Variant) -> int:
    with count_recomputes() as replays:
        variant.step()
    return replays.total


def throttle() -> list[list[float]]:
    """The pauses of one copy inside ``throttled``, and of one copy after it."""
    pauses: list[list[float]] = [[], []]

    class Noted:
        def __init__(self) -> None:
            self.into = pauses[0]

        def pause(self, seconds: float) -> None:
            self.into.append(seconds)

    pace: Any = Noted()
    here = links.Place.of(torch.device("cpu"))
    with gpu.throttled(pace, 0.5):
        links.copy(here, None, here, None, (torch.ones(2),))
    pace.into = pauses[1]
    links.copy(here, None, here, None, (torch.ones(2),))
    return pauses


def hidden() -> list[float | None]:
    """The hidden share in three cases: early hides half; late adds nothing; a variant ran out of memory."""
    seconds = [{"seconds a step": Spread(one, one, one)} for one in (1.0, 2.0, 1.5)]
    never, late, early = seconds
    return [
        gpu.hidden({"never": never, "late": late, "early": early}),
        gpu.hidden({"never": never, "late": never, "early": never}),
        gpu.hidden({"never": {"out of memory": True}, "late": late, "early": early}),
    ]


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # each count collects garbage, and what was imported is none
    cells = {str(cell): machinery.gradients_equal(cell) for cell in machinery.CELLS}
    rows = [ratios.count(name, job_of(), stages=2, m=4) for name, job_of in JOBS.items()]
    found = {"twin and ours equal to plain": cells, "ratios": rows, "large": count_large()}
    print(json.dumps({**found, "throttle": throttle(), "hidden": hidden()}, indent=1))


if __name__ == "__main__":
    main()
