"""The short version: counts of small models on a CPU, without seconds, printed as JSON.

    python benchmarks/graph/short.py
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from benchmarks.graph import exactness, frontier, planning, policies, resnet200

GPT = {"layers": 2, "width": 16, "heads": 2, "length": 32, "words": 17, "batch": 8}
RESNET = {"depth": 8, "width": 4, "side": 16, "batch": 16}
SIZES = {"gpt6": GPT, "resnet20": RESNET, "mlp24": {"layers": 12, "width": 16, "batch": 256}}
DEEP = {"depth": 29, "width": 4, "side": 8, "batch": 8}


def main() -> None:
    torch.set_num_threads(1)
    frontiers = [frontier.count(name, sizes, budgets=(0.6,)) for name, sizes in SIZES.items()]
    found = {
        "frontier": [{**one, "verdict": frontier.verdict(one)} for one in frontiers],
        "policies": [policies.count(name, SIZES[name]) for name in ("gpt6", "resnet20")],
        "deep": resnet200.measure(0, sizes=DEEP, shares=(0.5,)),
        "exactness": exactness.summary(exactness.count("resnet20", sizes=RESNET, budgets=(0.8, 0.7))),
        "planning": planning.count((60,)),
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
