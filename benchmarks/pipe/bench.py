"""What does ``Pipe`` cost? On a CPU its machinery and its ratios to the plain module; on a GPU samples and bytes."""
from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks.devices

from benchmarks.devices import chosen


def measure(device: torch.device, rounds: int, rehearsed: bool = False) -> dict[str, Any]:
    if device.type != "cpu":
        import gpu

        return (gpu.rehearse if rehearsed else gpu.measure)(device, rounds)
    import machinery
    import ratios

    results = {"machine": machine(), "rounds": rounds, "machinery": machinery.measure(rounds)}
    machinery.show(results["machinery"])
    results["ratios"] = ratios.measure(rounds)
    ratios.show(results["ratios"])
    return results


def machine() -> dict[str, str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": str(len(models)),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--rounds", type=int, default=20, help="at least 20 (default: 20)")
    parser.add_argument("--rehearse", action="store_true", help="on a GPU: does it all run? small models; no figures")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    device = chosen(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    results = measure(device, arguments.rounds, arguments.rehearse)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
