"""What does a byte budget over layers cost, beside every k-th layer, torch's own ways, and a trace?"""
from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from benchmarks.devices import chosen
from benchmarks.layers import beside, ways
from benchmarks.layers.short import SIZES
from benchmarks.machine import machine
from benchmarks.options import options, write


class Work(NamedTuple):
    """The models, sizes that replace the benchmark's own, and the budgets of torch's compiler."""

    models: Sequence[str]
    sizes: Mapping[str, dict[str, Any]]
    shares: Sequence[float]


FULL = Work(beside.MODELS, {}, ways.SHARES)


def rehearsed(device: str) -> Work:
    """The simulated device has no attention that can be traced, and no compiler."""
    return Work(beside.MODELS[device == "sim" :], SIZES, () if device == "sim" else (0.5,))


def measure(device: str, rounds: int, work: Work) -> dict[str, Any]:
    models = []
    for name in work.models:
        models.append(beside.measure(name, rounds, device, work.sizes.get(name), work.shares))
        beside.show(models[-1])
    if device == "cpu" and work is FULL:
        beside.draw(models, Path(__file__).with_name("beside.svg"))
    return {"machine": machine(), "rounds": rounds, "beside": models}


def main() -> None:
    arguments = options(__doc__, rounds=20).parse_args()
    device = chosen(arguments.device).type
    if device == "cpu":
        torch.set_num_threads(1)
    work = rehearsed(device) if arguments.rehearse else FULL
    write(measure(device, arguments.rounds, work), arguments.json)


if __name__ == "__main__":
    main()
