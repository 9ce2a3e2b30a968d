"""What does the graph level cost, beside torch's own ways to save memory? On a GPU, only parts that depend on it."""
from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from benchmarks.devices import chosen
from benchmarks.graph import exactness, frontier, planning, policies, resnet200
from benchmarks.graph.short import DEEP, SIZES
from benchmarks.graph.subjects import NAMES
from benchmarks.machine import machine
from benchmarks.options import options, write


class Work(NamedTuple):
    """The models to measure, their sizes and budgets."""

    models: Mapping[str, Sequence[str]]
    """The models of each part."""
    sizes: Mapping[str, dict[str, Any]]
    """By model: sizes that replace the benchmark's default sizes."""
    budgets: tuple[float, ...]
    """The budgets of the frontier."""


FULL = Work(
    models={"frontier": frontier.MODELS, "policies": policies.MODELS, "exactness": tuple(NAMES)},
    sizes={},
    budgets=frontier.BUDGETS,
)
REHEARSED = Work(
    models={
        "frontier": ("resnet20", "mlp24"),
        "policies": ("resnet20",),
        "exactness": ("resnet20", "mlp24", "unet", "lstm50", "moe"),
    },
    sizes={**SIZES, "resnet200": DEEP, "unet": {}, "lstm50": {}, "moe": {}},
    budgets=(0.8, 0.6),
)
UNTRACED = ("gpt6",)
"""Models that cannot be rehearsed on the simulated device: it has no attention that can be traced."""


def rehearsed(device: str) -> Work:
    own = () if device == "sim" else UNTRACED
    return REHEARSED._replace(models={part: (*own, *names) for part, names in REHEARSED.models.items()})


def measure(device: str, rounds: int, work: Work, parts: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"machine": machine(), "rounds": rounds}
    for part in parts:
        found[part] = PARTS[part](device, rounds, work)
    return found


def _frontier(device: str, rounds: int, work: Work) -> list[dict[str, Any]]:
    rows = []
    for name in work.models["frontier"]:
        rows.append(frontier.measure(name, rounds, device, work.budgets, work.sizes.get(name)))
        frontier.show(rows[-1])
    if device == "cpu" and work is FULL:
        frontier.draw(rows[0], Path(__file__).with_name("frontier.svg"))
    return rows


def _policies(device: str, rounds: int, work: Work) -> list[dict[str, Any]]:
    rows = []
    for name in work.models["policies"]:
        rows.append(policies.measure(name, rounds, device, work.sizes.get(name)))
        policies.show(rows[-1])
    return rows


def _resnet200(device: str, rounds: int, work: Work) -> dict[str, Any]:
    found = resnet200.measure(rounds, device, work.sizes.get("resnet200"))
    resnet200.show(found)
    return found


def _exactness(device: str, rounds: int, work: Work) -> list[dict[str, Any]]:
    found = [exactness.count(name, device, work.sizes.get(name)) for name in work.models["exactness"]]
    exactness.show(found)
    return found


def _planning(device: str, rounds: int, work: Work) -> dict[str, Any]:
    found = planning.measure()
    planning.show(found)
    return found


PARTS: dict[str, Callable[[str, int, Work], Any]] = {
    "frontier": _frontier,
    "policies": _policies,
    "ResNet-200": _resnet200,
    "exactness": _exactness,
    "planning": _planning,
}


def main() -> None:
    parser = options(__doc__, rounds=20)
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: all; planning on the CPU only")
    arguments = parser.parse_args()
    device = chosen(arguments.device).type
    if device == "cpu":
        torch.set_num_threads(1)
    parts = arguments.parts or [part for part in PARTS if device == "cpu" or part != "planning"]
    found = measure(device, arguments.rounds, rehearsed(device) if arguments.rehearse else FULL, parts)
    write(found, arguments.json)


if __name__ == "__main__":
    main()
