"""ResNet-200 on CIFAR, batch 64, in a tenth of eager's bytes: what does the step cost, by kind of operation?

    python benchmarks/graph/resnet200.py
"""
from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from benchmarks.graph.subjects import Subject, counted, subject, within
from benchmarks.turns import in_turn, ratios
from torchckpt import graph
from torchckpt.graph import Plan

__all__ = ["measure", "show"]

SHARES = (0.1,)


def measure(
    rounds: int, device: str = "cpu", sizes: dict[str, Any] | None = None, shares: tuple[float, ...] = SHARES
) -> dict[str, Any]:
    one = subject("resnet200", device, sizes)
    calls = _calls(one, shares)
    rows = {name: {**counted(one, call), "repeats": repeats(call.plan)} for name, call in calls.items()}
    if rounds:
        runs = {"eager": one.step(), **{name: one.step(call) for name, call in calls.items()}}
        seconds = in_turn(runs, rounds)
        rows = {name: {**row, "step": ratios(seconds[name], seconds["eager"])} for name, row in rows.items()}
    return {"eager bytes": one.eager_peak_bytes, "rows": rows}


def _calls(one: Subject, shares: tuple[float, ...]) -> dict[str, Any]:
    """Measure each budget, and the same graph without recomputation, which shows the time that has other causes."""
    found: dict[str, Any] = {
        "keeps all": graph.rematerialize(one.module, *one.inputs),
        'keep="memory"': graph.rematerialize(one.module, *one.inputs, keep="memory"),
    }
    for share in shares:
        budget = int(share * one.eager_peak_bytes)
        found[f"{share:.1%}"] = within(one, budget)
        found[f"{share:.1%}, profiled"] = within(one, budget, costs="profile")
    return found


def repeats(plan: Plan) -> dict[str, float]:
    """Planned seconds of recomputation by kind of operation, as shares of the eager step."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    for index in plan.schedule:
        if index in seen:
            operation = plan.flow.operations[index].repeat
            found[operation.name.rstrip("_0123456789")] += operation.seconds / plan.flow.seconds
        seen.add(index)
    return dict(found.most_common(4))


def show(found: dict[str, Any]) -> None:
    print(f"\nResNet-200: eager {found['eager bytes'] / 1e6:.1f} MB\n")
    print("| variant | peak / eager | extra FLOPs | planned extra time | step / eager | of it | bit-equal |")
    print("|---|---|---|---|---|---|---|")
    for name, row in found["rows"].items():
        most = ", ".join(f"{kind} {share:.1%}" for kind, share in row["repeats"].items())
        told = f"{row['peak']:.1%} | {row['flops']:+.1%} | {row['share']:+.1%} | {row.get('step', '')}"
        print(f"| {name} | {told} | {most} | {row['bit-equal']} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of eager's peak (default: 0.1)")
    arguments = parser.parse_args()
    show(measure(arguments.rounds, shares=tuple(arguments.shares)))


if __name__ == "__main__":
    main()
