"""What does a byte budget over layers cost, beside every k-th layer, torch's own ways, and a trace?

On an accelerator it is a Llama of 1.1 billion parameters (``large.py``); on a CPU, small models.
"""
from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from benchmarks.devices import chosen
from benchmarks.layers import beside, large, ways
from benchmarks.layers.short import SIZES
from benchmarks.machine import machine
from benchmarks.options import options, write


class Work(NamedTuple):
    """The models, sizes that replace the benchmark's own, and the budgets of torch's compiler."""

    models: Sequence[str]
    sizes: Mapping[str, dict[str, Any]]
    shares: Sequence[float]


FULL = Work(beside.MODELS, {}, ways.SHARES)


REHEARSED = Work(beside.MODELS, SIZES, (0.5,))


def measure(rounds: int, work: Work) -> dict[str, Any]:
    models = []
    for name in work.models:
        models.append(beside.measure(name, rounds, "cpu", work.sizes.get(name), work.shares))
        beside.show(models[-1])
    if work is FULL:
        beside.draw(models, Path(__file__).with_name("beside.svg"))
    return {"machine": machine(), "rounds": rounds, "beside": models}


def measure_large(device: torch.device, rounds: int, rehearsed: bool) -> dict[str, Any]:
    found = large.measure(device, rounds, large.SMALL if rehearsed else large.Sizes())
    large.show(found)
    if not rehearsed:
        large.draw(found, Path(__file__).with_name("large.svg"))
    return {"large": found}


def main() -> None:
    arguments = options(__doc__, rounds=20).parse_args()
    device = chosen(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
        found = measure(arguments.rounds, REHEARSED if arguments.rehearse else FULL)
    else:
        found = measure_large(device, arguments.rounds, arguments.rehearse)
    write(found, arguments.json)


if __name__ == "__main__":
    main()
