"""Which models of other libraries train as without checkpointing, to the bit? One model a family, three ways.

    python benchmarks/peers/run.py --out peers.jsonl                     # all; what is in the file is not run again
    python benchmarks/peers/run.py --only transformers --families bert llama
    python benchmarks/peers/run.py --budget --every 3 --out budget.jsonl # with checkpoint_layers(model, budget="60%")

Each family runs in a process of its own. A line of the file is a family; ``python benchmarks/peers/table.py`` reads it.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

import torch._dynamo  # noqa: F401  # here, once: else the optimizer imports it in each process

from benchmarks.peers.case import compared, planned
from benchmarks.peers.isolated import isolated
from benchmarks.peers.libraries import LIBRARIES, Library

STEPS, SECONDS, MOST_BYTES = 3, 120.0, 6 << 30


def row(library: Library, family: str, with_budget: bool) -> dict[str, Any]:
    """A line of the file."""
    began = time.monotonic()
    found = isolated(partial(_row, library, family, with_budget), SECONDS, MOST_BYTES)
    return {"library": library.name, "family": family, **found, "seconds": round(time.monotonic() - began, 1)}


def _row(library: Library, family: str, with_budget: bool) -> dict[str, Any]:
    case = library.case(family)
    return {"model": case.model, **(planned(case) if with_budget else compared(case, STEPS))}


def done(file: Path | None) -> set[tuple[str, str]]:
    """What is in the file already."""
    if file is None or not file.exists():
        return set()
    rows = map(json.loads, file.read_text().splitlines())
    return {(row["library"], row["family"]) for row in rows}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[*LIBRARIES], choices=[*LIBRARIES], metavar="LIBRARY")
    parser.add_argument("--families", nargs="+", metavar="NAME", help="default: all of them")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th family alone")
    parser.add_argument("--budget", action="store_true", help="with checkpoint_layers(budget=) in place of the switch")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a JSON line for each family is added to it")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    warnings.simplefilter("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    known = done(options.out)
    for name in options.only:
        library = LIBRARIES[name]()
        for family in options.families or library.families()[:: options.every]:
            if (name, family) in known:
                continue
            text = json.dumps(row(library, family, options.budget))
            print(text, flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(text + "\n")


if __name__ == "__main__":
    main()
