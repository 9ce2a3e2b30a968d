"""Does ``Pipe`` hide recomputation on several devices? Measured on simulated devices, beside the simulator's times."""
from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from tests.device import load, why_not

SIM = None if why_not() else load(8)  # before the first backward

from benchmarks.pipe.simulation.machines import H100, LAPTOP  # noqa: E402
from benchmarks.pipe.simulation.staged import VARIANTS  # noqa: E402
from benchmarks.pipe.simulation.trials import Cell, Trial, classic_seconds, hidden, replays_ahead, timelines, trials  # noqa: E402
from torchckpt.planning.draw.svg import svg  # noqa: E402
from torchckpt.planning.draw.units import Units  # noqa: E402

CELLS = [
    *(Cell(H100, p, m) for p, m in ((2, 4), (4, 4), (4, 8), (8, 8))),
    *(Cell(H100, p, m, 0.5) for p, m in ((4, 4), (4, 8), (8, 8))),
    *(Cell(LAPTOP, p, m) for p, m in ((2, 4), (4, 8), (8, 8))),
    *(Cell(LAPTOP, p, m, 0.5) for p, m in ((4, 4), (4, 8))),
]
PICTURED = Cell(H100, 4, 4, 0.5)
SHORT = Cell(H100, 4, 4, 0.5, step_seconds=0.1)
SHORT_NAMES = [name for name in VARIANTS if "late" not in name]
EARLY = {"GPipe": "GPipe, Pipe early", "1F1B": "1F1B, Pipe.step() early"}
STOCK = {base: f"{base}, torch.utils.checkpoint" for base in EARLY}


def summary(found: dict[str, Trial]) -> dict[str, Any]:
    """The figures of a cell: ratios of steps, and measured against simulated times."""
    off = {name: one.measured_seconds / one.simulated_seconds - 1 for name, one in found.items()}
    ratio = {base: found[EARLY[base]].measured_seconds / found[STOCK[base]].measured_seconds for base in EARLY}
    return {
        "measured over simulated, less 1": off,
        "ours / stock": ratio,
        "hidden, measured and simulated": {base: hidden(found, base, EARLY[base]) for base in EARLY},
        "bytes other than predicted": [name for name, one in found.items() if one.peak_bytes != one.predicted_bytes],
    }


def show(cell: Cell, found: dict[str, Trial]) -> None:
    """Two rows: for one backward of the whole mini-batch, and for ``Pipe.step()``."""
    for base, early in EARLY.items():
        own = {name: one for name, one in found.items() if name.startswith(base)}
        stock = own[STOCK[base]].measured_seconds
        ratios = ", ".join(f"{one.measured_seconds / stock:.2f}" for name, one in own.items() if "early" in name)
        measured, simulated = hidden(found, base, early)
        bytes_ratio = max(own[early].peak_bytes) / max(own[f"{base}, none"].peak_bytes)
        right = "as predicted" if all(one.peak_bytes == one.predicted_bytes for one in own.values()) else "OTHER"
        steps = [f"{one.measured_seconds:.3f} ({_off(one):+.1%})" for one in own.values()]
        steps += ["-"] * (6 - len(steps))
        cells = [cell.name, base, *steps, ratios, f"{measured:.2f} ({simulated:.2f})", f"{bytes_ratio:.2f}, {right}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def _off(one: Trial) -> float:
    return one.measured_seconds / one.simulated_seconds - 1


def table(sim: Any) -> list[dict[str, Any]]:
    rows = []
    for cell in CELLS:
        found = trials(sim, cell)
        show(cell, found)
        rows.append({"cell": cell.name, "trials": {name: asdict(one) for name, one in found.items()}, **summary(found)})
    return rows


def classic(sim: Any, cell: Cell, rounds: int) -> dict[str, list[float]]:
    return {
        "as published": classic_seconds(sim, cell, own_streams=False, rounds=rounds),
        "its nodes on copy streams": classic_seconds(sim, cell, own_streams=True, rounds=rounds),
    }


def draw(sim: Any, folder: Path) -> None:
    """Draw early above late recomputation, for one backward and for ``Pipe.step()``."""
    for base, file in (("GPipe", "simulated.svg"), ("1F1B", "simulated_step.svg")):
        late = f"{base}, Pipe{'.step()' if base == '1F1B' else ''} late"
        pair = timelines(sim, PICTURED, [EARLY[base], late])
        names = [f"measured: {EARLY[base]}", f"measured: {late}"]
        picture = svg(*pair, names=names, units=Units(time="ms", seconds=1e-3), copies=True)
        (folder / file).write_text(picture, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="one cell, as JSON: what the tests run")
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="draw the streams of two steps, and end")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if SIM is None:
        sys.exit(f"benchmarks/pipe/simulated.py: {why_not()}")
    if arguments.draw:
        draw(SIM, arguments.draw)
    elif arguments.short:
        found = {**summary(trials(SIM, SHORT, SHORT_NAMES)), "replays ahead": replays_ahead(SIM, SHORT)}
        print(json.dumps(found, indent=1))
    else:
        results = {"cells": table(SIM), "classic": classic(SIM, PICTURED, 20)}
        for name, seconds in results["classic"].items():
            print(f"classic, {name}: {median(seconds):.3f} ({seconds[0]:.3f} to {seconds[-1]:.3f})")
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
