"""Policies: our 'speed' and 'memory' beside those of TensorFlow's memory-saving gradients, on the same graphs.

    python benchmarks/graph/policies.py
"""
from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from benchmarks.graph.fewest import fewest_flops
from benchmarks.graph.subjects import NAMES, Subject, counted, subject, within
from benchmarks.turns import in_turn, ratios
from torchckpt import graph
from torchckpt.graph import Plan
from torchckpt.planning.remat.flow.dataflow import Dataflow
from torchckpt.planning.remat.flow.late import late, separating_storages

__all__ = ["MODELS", "count", "measure", "seed_memory", "seed_speed", "show"]

MODELS = ("gpt6", "resnet20", "unet")
_SMALLEST_BYTES = 4096  # 1024 elements; smaller values are not candidates


def seed_speed(flow: Dataflow) -> frozenset[int]:
    """Outputs of convolutions and matrix products."""
    return frozenset(s for operation in flow.operations[: flow.forward] if operation.flops for s in operation.writes)


def seed_memory(flow: Dataflow) -> frozenset[int]:
    """Every n-th of the values that separate the forward, about the square root of the number of all values."""
    small = frozenset(storage for storage, size in enumerate(flow.sizes_bytes) if size < _SMALLEST_BYTES)
    values = [s for one in flow.operations[: flow.forward] for s in one.writes if s not in small]
    separating = separating_storages(flow, small)
    step = max(1, math.ceil(len(separating) / math.sqrt(len(values))))
    return frozenset(separating[step::step] if step > 1 else separating)


def measure(name: str, rounds: int, device: str = "cpu", sizes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Peak, FLOPs and time of TensorFlow's two policies (the "seed"), of ours, and of ours with one byte less."""
    one = subject(name, device, sizes)
    made = _variants(one)
    rows = {key: counted(one, call) for key, call in made.items()}
    if rounds:
        runs = {"eager": one.step(), **{key: one.step(call) for key, call in made.items()}}
        seconds = in_turn(runs, rounds)
        rows = {key: {**row, "step": ratios(seconds[key], seconds["eager"])} for key, row in rows.items()}
    fewest = _fewest(made["seed's memory"].plan)
    return {"model": name, "eager bytes": one.eager_peak_bytes, "fewest": fewest, "rows": rows}


def _fewest(plan: Plan) -> float:
    """A lower bound of the recomputed FLOPs of all schedules with fewer bytes than ``plan``, over eager's FLOPs."""
    return fewest_flops(plan.flow, plan.peak_bytes - 1) / sum(operation.flops for operation in plan.flow.operations)


def count(name: str, sizes: dict[str, Any] | None) -> dict[str, Any]:
    return measure(name, 0, sizes=sizes)


def _variants(one: Subject) -> dict[str, Any]:
    eager = graph.rematerialize(one.module, *one.inputs).plan
    found = {}
    for policy, kept_by in (("speed", seed_speed), ("memory", seed_memory)):
        schedule = tuple(late(eager.flow, kept_by(eager.flow)))
        plan = replace(eager, schedule=schedule)
        found[f"seed's {policy}"] = graph.rematerialize(one.module, *one.inputs, keep=plan)
        found[f"ours {policy}"] = graph.rematerialize(one.module, *one.inputs, keep=policy)
        found[f"ours below the bytes of seed's {policy}"] = within(one, plan.peak_bytes - 1)
    return found


def show(found: dict[str, Any]) -> None:
    print(f"\n{NAMES[found['model']]}: eager {found['eager bytes'] / 1e6:.1f} MB\n")
    print("| variant | peak / eager | extra FLOPs | planned extra time | step / eager | bit-equal |")
    print("|---|---|---|---|---|---|")
    for key, row in found["rows"].items():
        step = row.get("step", "")
        told = f"{row['peak']:.1%} | {row['flops']:+.1%} | {row['share']:+.1%}"
        print(f"| {key} | {told} | {step} | {row['bit-equal']} |")
    print(f"\nBelow the bytes of the seed's 'memory' no schedule has less than {found['fewest']:+.1%} FLOPs.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    for name in arguments.models:
        show(measure(name, arguments.rounds))


if __name__ == "__main__":
    main()
