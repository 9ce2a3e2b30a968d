"""What does the graph level cost, and what do torch's own ways? On a CPU all of it; on a GPU what depends on one."""
from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import exactness
import frontier
import planning
import policies
import resnet200
import torch
from subjects import NAMES

from benchmarks.pipe.bench import machine


def measure(device: str, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {"machine": machine(), "rounds": rounds, "frontier": [], "policies": []}
    for name in frontier.MODELS:
        found["frontier"].append(frontier.measure(name, rounds, device))
        frontier.show(found["frontier"][-1])
    frontier.draw(found["frontier"][0], Path(__file__).with_name("frontier.svg"))
    for name in policies.MODELS:
        found["policies"].append(policies.measure(name, rounds, device))
        policies.show(found["policies"][-1])
    found["ResNet-200"] = resnet200.measure(rounds, device)
    resnet200.show(found["ResNet-200"])
    found["exactness"] = [exactness.count(name, device) for name in NAMES]
    exactness.show(found["exactness"])
    if device == "cpu":
        found["planning"] = planning.measure()
        planning.show(found["planning"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--rounds", type=int, default=20, help="at least 20 (default: 20)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    found = measure(arguments.device, arguments.rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
