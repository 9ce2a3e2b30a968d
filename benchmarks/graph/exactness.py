"""Exactness: are plans bit-equal with eager, and are their planned peaks equal to the measured peaks?

    python benchmarks/graph/exactness.py
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from benchmarks.graph.subjects import NAMES, Subject, is_same, subject
from torchckpt import graph
from torchckpt.errors import ArgumentError, BudgetInfeasible

__all__ = ["BUDGETS", "count", "show", "summary"]

BUDGETS = (0.9, 0.75, 0.6, 0.5, 0.4, 0.25)
POLICIES = (None, "speed", "memory")


def count(
    name: str, device: str = "cpu", sizes: dict[str, Any] | None = None, budgets: tuple[float, ...] = BUDGETS
) -> dict[str, Any]:
    """For a model, every policy and budget: bit-equality, planned and measured bytes; None if no plan fits."""
    one = subject(name, device, sizes)
    rows = {}
    for key, options in _options(one, budgets):
        try:
            made = graph.rematerialize(one.module, *one.inputs, **options)
        except BudgetInfeasible as error:
            rows[key] = {"least": error.plan.peak_bytes / one.eager_peak_bytes}
            continue
        except ArgumentError:  # "speed" needs a convolution or a matrix product
            continue
        rows[key] = {
            "bit-equal": is_same(one.result(made), one.result()),
            "planned": made.plan.peak_bytes,
            "measured": one.peak_bytes(one.step(made)),
            "budget": options.get("budget"),
        }
    operations = len(graph.rematerialize(one.module, *one.inputs).plan.flow.operations)
    return {"model": name, "operations": operations, "eager bytes": one.eager_peak_bytes, "rows": rows}


def _options(one: Subject, budgets: tuple[float, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    for policy in POLICIES:
        yield f"keep={policy!r}", {"keep": policy}
    for share in budgets:
        yield f"{share:.0%}", {"budget": int(share * one.eager_peak_bytes)}


def summary(found: dict[str, Any]) -> dict[str, Any]:
    made = [row for row in found["rows"].values() if "measured" in row]
    return {
        "equal": sum(row["bit-equal"] for row in made),
        "plans": len(made),
        "worst prediction": max(abs(row["planned"] / row["measured"] - 1) for row in made),
        "over budget": sum(row["budget"] is not None and row["measured"] > row["budget"] for row in made),
        "infeasible": [f"{key} (least {row['least']:.1%})" for key, row in found["rows"].items() if "least" in row],
    }


def show(found: Iterable[dict[str, Any]]) -> None:
    print("| model | operations | eager | bit-equal | planned against measured, at worst | over budget | no plan |")
    print("|---|---|---|---|---|---|---|")
    for one in found:
        told = summary(one)
        print(
            f"| {NAMES.get(one['model'], one['model'])} | {one['operations']} | {one['eager bytes'] / 1e6:.1f} MB"
            f" | {told['equal']} of {told['plans']} | {told['worst prediction']:.4%} | {told['over budget']}"
            f" | {', '.join(told['infeasible'])} |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(NAMES))
    show(map(count, parser.parse_args().models))


if __name__ == "__main__":
    main()
