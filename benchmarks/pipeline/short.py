"""The short version: two cells, checked by the order of events, not by seconds, and printed as JSON.

    python benchmarks/pipeline/short.py
    python benchmarks/pipeline/short.py forwards      # of blocks, where the backward is split; two stages on a rank

A message takes ten times as long as a forward, so that what begins before a gradient arrives does so on any machine.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from benchmarks.pipeline.cells.cell import Cell
from benchmarks.pipeline.cells.rounds import Measured, Settings, run_cells
from benchmarks.pipeline.counts import count_forwards

CELLS = (Cell("gpipe", 2, 4, 10.0), Cell("1f1b", 2, 4, 10.0))
SETTINGS = Settings(rounds=1, warm_up=1, forward_seconds=0.005)


def events(measured: Measured) -> dict[str, Any]:
    return {
        "order": [" ".join(actions) for actions in measured.order],
        "replays": [len(early) for early in measured.early],
        "began before the gradient arrived": [sum(seconds > 0 for seconds in early) for early in measured.early],
        "gradients bit-equal": measured.equal,
    }


def main(what: str) -> None:
    found: dict[str, Any] = {}
    if what == "forwards":
        found = count_forwards()["rows"]
    else:
        run_cells(CELLS, SETTINGS, lambda measured: found.update({str(measured.cell): events(measured)}))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:] or ["cells"])
