"""What does ``Pipe`` cost? On a CPU its machinery and its ratios to the plain module; on a GPU samples and bytes."""
from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch


def measure(device: torch.device, rounds: int) -> dict[str, Any]:
    if device.type != "cpu":
        import gpu

        return gpu.measure(device, rounds)
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
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    results = measure(torch.device(arguments.device), arguments.rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
