"""The short version: what can be counted, of small models, on a CPU; no seconds. Prints it as JSON.

    PYTHONPATH=. python benchmarks/graph/short.py
"""
from __future__ import annotations

import json

import exactness
import frontier
import planning
import policies
import resnet200
import torch

GPT = {"layers": 3, "width": 32, "heads": 2, "length": 32, "words": 17, "batch": 4}
RESNET = {"depth": 20, "width": 4, "side": 16, "batch": 8}
SIZES = {"gpt6": GPT, "resnet20": RESNET, "mlp24": {"width": 16, "batch": 256}}


def main() -> None:
    torch.set_num_threads(1)
    frontiers = [frontier.count(name, sizes, budgets=(0.7, 0.4)) for name, sizes in SIZES.items()]
    found = {
        "frontier": [{**one, "verdict": frontier.verdict(one)} for one in frontiers],
        "policies": [policies.count(name, SIZES[name]) for name in ("gpt6", "resnet20")],
        "deep": resnet200.measure(0, sizes={"depth": 38, "width": 4, "side": 16, "batch": 4}),
        "exactness": exactness.summary(exactness.count("resnet20", sizes=RESNET)),
        "planning": planning.count((100,)),
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
