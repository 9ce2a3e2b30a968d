"""The short version: counts of small models on a CPU, without a clock, printed as JSON.

    python benchmarks/layers/short.py gpt6 resnet20 unet

The planner gets the FLOPs of a replay in the place of its seconds: so it is to recompute no more of them than any
``every=k`` that fits. Traces are planned with little effort, which takes most of the time.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from benchmarks.graph.subjects import Subject
from benchmarks.layers import beside, ways
from benchmarks.layers.ways import Way, budgeted
from torchckpt.tensors import flop_formula

GPT = {"layers": 3, "width": 16, "heads": 2, "length": 32, "words": 17, "batch": 4}
RESNET = {"depth": 14, "width": 4, "side": 16, "batch": 8}
UNET = {"levels": 2, "width": 8, "side": 16, "batch": 4}
SIZES = {"gpt6": GPT, "resnet20": RESNET, "unet": UNET}


class Flops(TorchDispatchMode):
    """Counts FLOPs, and holds no tensor, as torch's counter does by its hooks of modules."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs, formula = func(*args, **(kwargs or {})), flop_formula(func.overloadpacket)
        self.total += formula(*args, **(kwargs or {}), out_val=outputs) if formula else 0
        return outputs


def by_flops(one: Subject, budget_bytes: int) -> Way:
    """``checkpoint_layers(budget=)``, whose clock tells the FLOPs so far."""
    with Flops() as flops:
        clock = mock.Mock(stamp=lambda: flops.total, reader=lambda: float)
        with mock.patch("torchckpt.layers.count.Clock", return_value=clock):
            return budgeted(one, budget_bytes)


def main() -> None:
    torch.set_num_threads(1)
    names = sys.argv[1:] or SIZES
    little = mock.patch("torchckpt.planning.remat.search.planner._SEARCH_WORK", 400_000)
    with mock.patch.object(ways, "budgeted", by_flops), little:
        models = [beside.measure(name, 0, sizes=SIZES[name], shares=()) for name in names]
    print(json.dumps([{**found, "verdict": beside.verdict(found)} for found in models], indent=1))


if __name__ == "__main__":
    main()
