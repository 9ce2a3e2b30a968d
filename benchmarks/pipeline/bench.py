"""For ``benchmarks/run.py``: the measurement that fits the device. On the CPU the four named cells, else ``gpu.py``."""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks.devices

from benchmarks.devices import chosen


def measure(device: torch.device, rounds: int, rehearsed: bool = False) -> dict[str, Any]:
    if device.type == "cpu":
        from cells import NAMED
        from rounds import Settings
        from run import measure_cells
        from table import machine

        settings = Settings(rounds, 2, 0.01)
        return {"machine": machine(), "settings": vars(settings), "cells": measure_cells(NAMED, settings)}
    import gpu

    return (gpu.rehearse if rehearsed else gpu.measure)(device, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--rounds", type=int, default=20, help="at least 20 (default: 20)")
    parser.add_argument("--rehearse", action="store_true", help="on a GPU: does it all run? small models; no figures")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    results = measure(chosen(arguments.device), arguments.rounds, arguments.rehearse)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
