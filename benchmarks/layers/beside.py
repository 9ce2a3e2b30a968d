"""Beside: bytes and seconds of each way to run the step of one model, in one table; and a picture of all models.

    python benchmarks/layers/beside.py gpt6 --rounds 20
"""
from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from benchmarks.graph.subjects import NAMES, Subject, flops, likeness, subject
from benchmarks.layers import ways
from benchmarks.layers.ways import Way
from benchmarks.turns import in_turn, ratios
from torchckpt.planning.remat.frontier_svg import draw_frontier
from torchckpt.testing import peak_bytes

__all__ = ["MODELS", "draw", "measure", "show", "verdict"]

MODELS = ("gpt6", "resnet20", "unet")
OURS, TRACED, EVERY, COMPILED = "budget=, bytes of", "rematerialize, bytes of", "every=", "torch.compile, budget"
_ROOM = 1.001


def measure(
    name: str,
    rounds: int,
    device: str = "cpu",
    sizes: dict[str, Any] | None = None,
    shares: Sequence[float] = ways.SHARES,
) -> dict[str, Any]:
    """Of each way the peak, the FLOPs and the step over eager's. Budgets are the bytes of each ``every=k``.

    Peaks are those of the allocator. Bytes are those that operators make, which is what plans count: on a CPU kernels
    take some more for themselves meanwhile. Budgets are larger by a thousandth, since in a replay norms have copies of
    their buffers, which also count in the plan of a call that is then kept.

    Args:
        rounds: 0: nothing is timed.
    """
    one = subject(name, device, sizes)
    made = dict(_made(one, shares))
    rows = {key: _counted(one, key, way) for key, way in made.items()}
    runs = {"eager": one.step(), **{key: way.step(one) for key, way in made.items()}}
    seconds = in_turn(runs, rounds) if rounds else {}
    for key, row in rows.items():
        fitting = [other for other in rows if other.startswith(EVERY) and _fits(rows[other], row["budget bytes"])]
        if fitting:
            row["fewest flops"] = min(rows[other]["flops"] for other in fitting)
        if rounds:
            row["step"] = ratios(seconds[key], seconds["eager"])
        if rounds and fitting:
            best = min(fitting, key=lambda other: median(seconds[other]))
            row["best"], row["step over the best"] = best, ratios(seconds[key], seconds[best])
    return {"model": name, "eager bytes": one.eager_peak_bytes, "eager flops": one.eager_flops, "rows": rows}


def _made(one: Subject, shares: Sequence[float]) -> Iterator[tuple[str, Way]]:
    yield "budget=, everything fits", ways.keep_all(one)
    for name, every in ways.POLICIES.items():
        yield name, ways.selective(one, every)
    for share in shares:
        yield f"{COMPILED} {share}", ways.compiled(one, share)
    budgets = {}
    for every, way in ways.every_kth(one):
        budgets[every] = int(_ROOM * peak_bytes(way.step(one), one.device))
        yield f"{EVERY}{every}", way
    for every, budget in budgets.items():
        yield f"{OURS} {EVERY}{every}", ways.budgeted(one, budget)
        yield f"{TRACED} {EVERY}{every}", ways.traced(one, budget)


def _counted(one: Subject, key: str, way: Way) -> dict[str, Any]:
    step, is_compiled = way.step(one), key.startswith(COMPILED)  # what looks at operators would run eager code instead
    return {
        "budget bytes": way.budget_bytes if key.startswith((OURS, TRACED)) else None,
        "peak bytes": one.peak_bytes(step),
        "bytes": None if is_compiled else peak_bytes(step, one.device),
        "flops": None if is_compiled else flops(step) / one.eager_flops - 1,
        "gradients": likeness(one.result(way.call, way.module), one.result()),
    }


def _fits(row: dict[str, Any], budget_bytes: int | None) -> bool:
    return budget_bytes is not None and row["bytes"] <= budget_bytes


# tables ---------------------------------------------------------------------------------------------------------------


def show(found: dict[str, Any]) -> None:
    eager_bytes = found["eager bytes"]
    print(f"\n{NAMES[found['model']]}: eager {eager_bytes / 1e6:.1f} MB, {found['eager flops'] / 1e9:.2f} GFLOP\n")
    print("| way | budget | bytes | peak | extra FLOPs | step / eager | step / best fitting `every=k` | gradients |")
    print("|---|---|---|---|---|---|---|---|")
    for key, row in found["rows"].items():
        amounts = row["budget bytes"], row["bytes"], row["peak bytes"]
        sizes = ["" if amount is None else f"{amount / eager_bytes:.1%}" for amount in amounts]
        extra = "" if row["flops"] is None else f"{row['flops']:+.1%}"
        over = f"{row['step over the best']}, {row['best']}" if "best" in row else ""
        cells = [key, *sizes, extra, str(row.get("step", "")), over]
        print(f"| {' | '.join(cells)} | {row['gradients']} |")
    print(f"\n{verdict(found)}")


def verdict(found: dict[str, Any]) -> dict[str, Any]:
    """At how many budgets ``checkpoint_layers(budget=)`` was run; at which it takes more bytes, recomputes more FLOPs
    than the best ``every=k`` that fits, or is slower than that by more than the rounds differ."""
    rows = {key: row for key, row in found["rows"].items() if key.startswith(OURS)}
    return {
        "budgets": len(rows),
        "over budget": [key for key, row in rows.items() if not _fits(row, row["budget bytes"])],
        "more FLOPs": [key for key, row in rows.items() if row["flops"] > row.get("fewest flops", 9.0) + 1e-6],
        "slower": [key for key, row in rows.items() if "best" in row and row["step over the best"].p10 > 1],
    }


_TOOLS = {
    EVERY: "every=k", "SAC": "torch's selective policies", COMPILED: "torch.compile, its budgets",
    TRACED: "graph.rematerialize",
}  # fmt: skip


def draw(models: Sequence[dict[str, Any]], path: Path) -> None:
    """A chart of each model, one under the other: peak bytes across, extra time up."""
    charts = [_chart(found) for found in models]
    heights = [float(re.search(r' height="([\d.]+)"', chart)[1]) for chart in charts]  # type: ignore[index]
    places = [sum(heights[:number]) for number in range(len(charts))]
    parts = [chart.replace("<svg ", f'<svg y="{top:g}" ', 1) for chart, top in zip(charts, places)]
    size = f'width="720" height="{sum(heights):g}"'
    text = "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', *parts, "</svg>\n"])
    path.write_text(text, encoding="utf-8")


def _chart(found: dict[str, Any]) -> str:
    """The chart of one model: up, extra time, or extra FLOPs where nothing was timed. Compiled code counts none."""
    is_timed = all("step" in row for row in found["rows"].values())
    points: dict[str, list[tuple[int, float]]] = {"ours": [], **{tool: [] for tool in _TOOLS.values()}}
    for key, row in found["rows"].items():
        tool = next((tool for start, tool in _TOOLS.items() if key.startswith(start)), "ours")
        cost = row["step"].median - 1 if is_timed else row["flops"]
        if cost is not None:
            points[tool].append((row["peak bytes"], cost))
    own = points.pop("ours")
    cost_name = "extra time" if is_timed else "extra FLOPs"
    title = f"{NAMES[found['model']]}: bytes and {cost_name}, by layers and otherwise"
    return draw_frontier(
        own, {tool: each for tool, each in points.items() if each}, eager_peak_bytes=found["eager bytes"], title=title,
        name="checkpoint_layers(budget=)", cost=cost_name,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--draw", type=Path, help="a file for the picture")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models = []
    for name in arguments.models:
        models.append(measure(name, arguments.rounds))
        show(models[-1])
    if arguments.draw:
        draw(models, arguments.draw)


if __name__ == "__main__":
    main()
