"""Planning: how long it takes to find separators, to plan a step, and to trace and plan a GPT of 24 layers.

    python benchmarks/graph/planning.py
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from benchmarks.graph.subjects import subject
from tests.planning.remat import flows
from torchckpt import graph
from torchckpt.planning.remat.flow.dataflow import Dataflow
from torchckpt.planning.remat.flow.late import separators
from torchckpt.planning.remat.flow.memory import simulate
from torchckpt.planning.remat.search.planner import fit

__all__ = ["FLOWS", "count", "measure", "show"]

FLOWS: dict[str, Callable[[int], Dataflow]] = {
    "transformer": lambda size: flows.transformer(size // 25),
    "ResNet": lambda size: flows.resnet(size // 15),
    "perceptron": lambda size: flows.mlp(size // 5),
    "random": lambda size: flows.random_step(size // 3),
}
"""Functions that make a step with about so many operations."""

BOUNDS = {400: 1.0, 4_000: 5.0, 40_000: 60.0}
"""The required seconds, by number of operations."""

_SHARES = (0.7, 0.5, 0.35)


def measure(rounds: int = 3) -> dict[str, Any]:
    """The least processor seconds of ``rounds``; tens of thousands of operations are planned only once."""
    plans = [_planned(kind, size, share, rounds if size < 10_000 else 1)
             for size in BOUNDS for kind in FLOWS for share in _SHARES]
    chain = [[node - 1, node - 3] if node > 3 else [] for node in range(3000)]
    return {
        "plans": plans,
        "separators of 3,000 nodes": _least(lambda: separators(chain), 20),
        "GPT-24": _gpt24(rounds),
    }


def count(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """The counts, without seconds."""
    found = [_planned(kind, size, share, 1) for size in sizes for kind in FLOWS for share in _SHARES]
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in found]


def _planned(kind: str, size: int, share: float, rounds: int) -> dict[str, Any]:
    flow = FLOWS[kind](size)
    budget = int(share * simulate(flow, flow.eager).peak_bytes)
    seconds = []
    for _ in range(rounds):
        begin = process_time()
        found = fit(flow, budget)
        seconds.append(process_time() - begin)
    print(f"{kind}, {len(flow.operations)} operations, {share:.0%}: {min(seconds):.2f} s", file=sys.stderr, flush=True)
    return {
        "kind": kind,
        "operations": len(flow.operations),
        "size": size,
        "share": share,
        "fits": found.peak_bytes <= budget,
        "extra": found.seconds / flow.seconds - 1,
        "seconds": min(seconds),
    }


def _gpt24(rounds: int) -> dict[str, float]:
    """Seconds to trace and plan, after a first trace that imports the modules of tracing and is not measured."""
    one = subject("gpt24")
    graph.rematerialize(subject("gpt6").module, *one.inputs)
    capture = _least(lambda: graph.rematerialize(one.module, *one.inputs), rounds)
    both = _least(lambda: graph.rematerialize(one.module, *one.inputs, budget="50%"), rounds)
    return {"trace": capture, "trace and plan": both}


def _least(run: Callable[[], object], rounds: int) -> float:
    return min(_seconds(run) for _ in range(rounds))


def _seconds(run: Callable[[], object]) -> float:
    begin = process_time()
    run()
    return process_time() - begin


def show(found: dict[str, Any]) -> None:
    print("| operations | asked for | " + " | ".join(FLOWS) + " |\n|---|---|" + "---|" * len(FLOWS))
    for size, bound in BOUNDS.items():
        rows = [row for row in found["plans"] if row["size"] == size]
        cells = [_cell([row for row in rows if row["kind"] == kind]) for kind in FLOWS]
        print(f"| {size} | {bound:g} s | {' | '.join(cells)} |")
    print(f"\nseparators of 3,000 nodes: {found['separators of 3,000 nodes'] * 1e3:.2f} ms")
    print("GPT-24: " + ", ".join(f"{what} {seconds:.2f} s" for what, seconds in found["GPT-24"].items()))


def _cell(rows: list[dict[str, Any]]) -> str:
    parts = [f"{row['seconds']:.2f} s ({row['extra']:+.1%}{'' if row['fits'] else ', least'})" for row in rows]
    return f"{rows[0]['operations']}: {', '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    show(measure(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
