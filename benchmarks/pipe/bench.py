"""What does ``Pipe`` cost? On a CPU, its overhead and ratios to the plain module; on GPUs, samples/s and bytes."""
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
    if device.type != "cpu":
        from benchmarks.pipe import gpu

        return (gpu.rehearse if rehearsed else gpu.measure)(device, rounds)
    from benchmarks.pipe import machinery, ratios

    results = {"machine": machine(), "rounds": rounds, "machinery": machinery.measure(rounds)}
    machinery.show(results["machinery"])
    results["ratios"] = ratios.measure(rounds)
    ratios.show(results["ratios"])
    return results


def main() -> None:
    arguments = options(__doc__, rounds=20).parse_args()
    device = chosen(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    results = measure(device, arguments.rounds, arguments.rehearse)
    write(results, arguments.json)


if __name__ == "__main__":
    main()
