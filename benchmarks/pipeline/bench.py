"""The pipeline benchmark for ``benchmarks/run.py``: on a CPU the four named cells, on other devices ``gpu.py``."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from benchmarks.devices import chosen
from benchmarks.machine import machine
from benchmarks.options import options, write


def measure(device: torch.device, rounds: int, rehearsed: bool = False) -> dict[str, Any]:
    if device.type == "cpu":
        from benchmarks.pipeline.cells.cell import NAMED
        from benchmarks.pipeline.cells.rounds import Settings
        from benchmarks.pipeline.run import measure_cells

        settings = Settings(rounds, 2, 0.01)
        return {"machine": machine(), "settings": vars(settings), "cells": measure_cells(NAMED, settings)}
    from benchmarks.pipeline import gpu

    return (gpu.rehearse if rehearsed else gpu.measure)(device, rounds)


def main() -> None:
    arguments = options(__doc__, rounds=20).parse_args()
    write(measure(chosen(arguments.device), arguments.rounds, arguments.rehearse), arguments.json)


if __name__ == "__main__":
    main()
