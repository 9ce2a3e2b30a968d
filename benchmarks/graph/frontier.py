"""Frontier: memory against recomputation, beside torch's ``activation_memory_budget``, min-cut and checkpoints.

    python benchmarks/graph/frontier.py
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from benchmarks.graph.subjects import NAMES, Call, Subject, flops, likeness, subject
from benchmarks.graph.torch_baselines import ROUTES, budgeted, by_block
from benchmarks.turns import in_turn, ratios
from torchckpt import graph
from torchckpt.errors import BudgetInfeasible
from torchckpt.planning.remat.frontier_svg import draw_frontier

__all__ = ["BUDGETS", "MODELS", "count", "draw", "measure", "show"]

MODELS = ("gpt6", "resnet20", "mlp24", "unet")
BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
"""Torch's budgets. Our budgets are the bytes that torch then takes, and these shares of eager's peak."""

_LOSS_BYTES = 64  # our planner leaves room for a loss outside of the graph


@dataclass
class Variant:
    """One way to run the step, and its counts; ``told`` has further facts."""

    step: Callable[[], None]
    peak: float  # bytes, over eager's
    flops: float  # recomputed FLOPs, over eager's FLOPs
    gradients: str  # "equal" to the bit, "close" by allclose, or "wrong"
    told: dict[str, Any] = field(default_factory=dict)


def measure(
    name: str,
    rounds: int,
    device: str = "cpu",
    budgets: tuple[float, ...] = BUDGETS,
    sizes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The counts of one model, and for each variant the time of its step over eager's."""
    one = subject(name, device, sizes)
    variants = variants_of(one, budgets)
    distinct = {id(variant): variant.step for variant in variants.values()}
    seconds = in_turn({"eager": one.step(), **distinct}, rounds)
    found = _counted(one, variants)
    for key, variant in variants.items():
        found["variants"][key]["step"] = ratios(seconds[id(variant)], seconds["eager"])
        other = variants.get(key.removeprefix("ours at "), variant)
        if other is not variant:
            found["variants"][key]["step over torch's"] = ratios(seconds[id(variant)], seconds[id(other)])
    return found


def count(name: str, sizes: dict[str, Any], budgets: tuple[float, ...]) -> dict[str, Any]:
    """The counts of one model, without times."""
    one = subject(name, sizes=sizes)
    return _counted(one, variants_of(one, budgets))


def variants_of(one: Subject, budgets: tuple[float, ...]) -> dict[str, Variant]:
    """Variants such as ``torch 0.5``, ``ours at torch 0.5`` (with as many bytes), ``ours 0.5`` and ``by block``."""
    found: dict[str, Variant] = {}
    route = route_of(one)
    ours: dict[int, Variant] = {}

    def fitted(budget: int) -> Variant:
        least = found.get("ours 0.0")
        if least is not None and budget <= least.told["planned bytes"]:
            return least
        if budget not in ours:
            call, told = rematerialized(one, budget)
            ours[budget] = variant(one, call, **told)
        return ours[budget]

    others = {f"torch {share}": variant(one, budgeted(one, share, route), route=route) for share in (1.0, *budgets)}
    others["by block"] = variant(one, None, by_block(one))
    for key, theirs in others.items():
        found[key] = theirs
        same_bytes = min(round(theirs.peak * one.eager_peak_bytes), one.eager_peak_bytes) + _LOSS_BYTES
        found[f"ours at {key}"] = fitted(same_bytes)
    for share in sorted(budgets):
        found[f"ours {share}"] = fitted(max(1, int(share * one.eager_peak_bytes)))
    return found


def route_of(one: Subject) -> str:
    """The graph as traced, if torch can run it: it is faster, and takes fewer bytes below half of eager's peak."""
    try:
        one.step(budgeted(one, 0.5, ROUTES[0]))()
    except RuntimeError:  # this backward reads running statistics after the forward has changed them
        return ROUTES[1]
    return ROUTES[0]


def variant(one: Subject, call: Call | None, module: nn.Module | None = None, **told: Any) -> Variant:
    step = one.step(call, module)
    peak, more = one.peak_bytes(step) / one.eager_peak_bytes, flops(step) / one.eager_flops - 1
    return Variant(step, peak, more, likeness(one.result(call, module), one.result()), told)


def rematerialized(one: Subject, budget: int) -> tuple[Call, dict[str, Any]]:
    """Our plan within ``budget`` bytes; if none fits, the plan with the least bytes, from the error."""
    made = _within(one, budget)
    plan = made.plan
    fits = plan.peak_bytes <= budget
    return made, {"planned bytes": plan.peak_bytes, "budget bytes": budget, "fits": fits, "share": plan.recompute_share}


def _within(one: Subject, budget: int) -> Any:
    try:
        return graph.rematerialize(one.module, *one.inputs, budget=budget)
    except BudgetInfeasible as error:
        plan = error.plan
    try:
        return graph.rematerialize(one.module, *one.inputs, budget=plan.peak_bytes + _LOSS_BYTES)
    except BudgetInfeasible:
        return graph.rematerialize(one.module, *one.inputs, keep=plan)


def _counted(one: Subject, variants: dict[str, Variant]) -> dict[str, Any]:
    rows = {
        key: {"peak": variant.peak, "flops": variant.flops, "gradients": variant.gradients, **variant.told}
        for key, variant in variants.items()
    }
    return {"model": one.name, "eager bytes": one.eager_peak_bytes, "eager flops": one.eager_flops, "variants": rows}


# tables ---------------------------------------------------------------------------------------------------------------


def show(found: dict[str, Any]) -> None:
    variants = found["variants"]
    told = f"eager {found['eager bytes'] / 1e6:.1f} MB, {found['eager flops'] / 1e9:.2f} GFLOP"
    print(f"\n{NAMES[found['model']]}: {told}; torch's graph: {variants['torch 1.0']['route']}\n")
    print("| budget | torch | ours in torch's bytes | step, ours / torch | ours in this share of eager's bytes |")
    print("|---|---|---|---|---|")
    for key in [key for key in variants if not key.startswith("ours")]:
        budget, ours = key.removeprefix("torch "), variants[f"ours at {key}"]
        share = variants.get(f"ours {budget}")
        over = str(ours.get("step over torch's", ""))
        cells = [_told(variants[key]), _told(ours), over, _told(share) if share else ""]
        print(f"| {budget} | {' | '.join(cells)} |")
    print(f"\n{verdict(found)}")


def _told(row: dict[str, Any]) -> str:
    step = f", {row['step']}" if "step" in row else ""
    gradients = "" if row["gradients"] == "equal" else f", {row['gradients']}"
    return f"{row['peak']:.1%} {row['flops']:+.1%}{step}{gradients}"


def verdict(found: dict[str, Any]) -> dict[str, Any]:
    """A summary: at how many of torch's budgets our plan, with as many bytes, computes less or takes less memory; at
    which it computes more; and at which its step is slower by more than the rounds differ."""
    variants = found["variants"]
    pairs = {key: (row, variants[f"ours at {key}"]) for key, row in variants.items() if key.startswith("torch 0")}
    return {
        "better": sum(ours["flops"] < row["flops"] or ours["peak"] < row["peak"] for row, ours in pairs.values()),
        "budgets": len(pairs),
        "more bytes": [key for key, (row, ours) in pairs.items() if ours["peak"] > row["peak"] + 1e-5],
        "more FLOPs": [key for key, (row, ours) in pairs.items() if ours["flops"] > row["flops"] + 1e-6],
        "slower": [key for key, (_, ours) in pairs.items() if _is_slower(ours)],
    }


def _is_slower(ours: dict[str, Any]) -> bool:
    return "step over torch's" in ours and ours["step over torch's"].p10 > 1


_TOOLS = {"by block": "torch.utils.checkpoint by block", "torch 1.0": "torch's min-cut"}


def draw(found: dict[str, Any], path: Path) -> None:
    points: dict[str, list[tuple[int, float]]] = {}
    budgets: dict[tuple[int, float], str] = {}
    for key, row in found["variants"].items():
        tool = "ours" if "ours" in key else _TOOLS.get(key, "torch's activation_memory_budget")
        point = round(row["peak"] * found["eager bytes"]), row["flops"]
        points.setdefault(tool, []).append(point)
        if tool not in _TOOLS.values() and not key.startswith("ours at"):
            share = key.rpartition(" ")[2]
            budgets[point] = f"{budgets[point]}, {share}" if point in budgets else share
    own = points.pop("ours")
    told = verdict(found)
    title = f"{NAMES[found['model']]}: better than torch at {told['better']} of its {told['budgets']} budgets"
    text = draw_frontier(
        own, points, eager_peak_bytes=found["eager bytes"], title=title, cost="extra FLOPs", budgets=budgets
    )
    path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--draw", type=Path, help="folder for a picture of each model")
    arguments = parser.parse_args()
    for name in arguments.models:
        found = measure(name, arguments.rounds)
        show(found)
        if arguments.draw:
            draw(found, arguments.draw / f"{name}.svg")


if __name__ == "__main__":
    main()
