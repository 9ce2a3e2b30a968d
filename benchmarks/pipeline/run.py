"""Does recompute_ahead hide recomputation as the simulator says? On two cores, with stages that behave as devices.

    python benchmarks/pipeline/run.py                              # everything, about 40 minutes
    python benchmarks/pipeline/run.py --cells named                # the four cells with a required ratio
    python benchmarks/pipeline/run.py --cells 1f1b-4-16-1 gpipe-2-8-0.25 --variants none stock ours unplaced

A cell is SCHEDULE-p-m-tc: p stages on as many processes, m micro-batches, a message that takes tc forwards.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from benchmarks.machine import machine
from benchmarks.options import write
from benchmarks.pipeline.cells.cell import FULL, NAMED, Cell
from benchmarks.pipeline.cells.rounds import Settings, run_cells
from benchmarks.pipeline.cells.table import HEAD, failures, line, row_of
from benchmarks.pipeline.cells.variants import MORE
from benchmarks.pipeline.cores import on_two_cores, show_cores
from benchmarks.pipeline.counts import count_forwards, count_peaks, show_counts

RESULTS = Path(__file__).parents[1] / "results" / "pipeline-cpu.json"


def measure_cells(cells: Sequence[Cell], settings: Settings) -> list[dict[str, Any]]:
    """Measure ``cells``; return their rows, each printed when it is ready."""
    rows: list[dict[str, Any]] = []

    def done(measured: Any) -> None:
        rows.append(row_of(measured))
        print(line(rows[-1]), flush=True)

    print(HEAD)
    run_cells(cells, settings, done)
    return rows


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    settings = Settings(arguments.rounds, 2, arguments.forward_ms / 1e3, tuple(arguments.variants))
    results: dict[str, Any] = {"machine": machine(), "settings": vars(settings)}
    results["cells"] = measure_cells(arguments.cells, settings)
    if not arguments.cells_only:
        results["forwards"], results["peaks"] = count_forwards(), count_peaks()
        print(show_counts(results["forwards"], results["peaks"]), flush=True)
        results["two cores"] = on_two_cores(arguments.rounds)
        print(show_cores(results["two cores"]), flush=True)
    results["failures"] = [fault for row in results["cells"] for fault in failures(row)]
    results["failures"] += [fault for name in ("forwards", "peaks", "two cores") for fault in _of(results, name)]
    return results


def _of(results: dict[str, Any], name: str) -> list[str]:
    return results.get(name, {}).get("failures", [])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["full"], help='"full", "named", or cells such as 1f1b-4-16-0.25')
    parser.add_argument("--cells-only", action="store_true", help="measure only the cells, no counts")
    parser.add_argument("--variants", nargs="+", choices=MORE, default=(), help="must include none, stock and ours")
    parser.add_argument("--rounds", type=int, default=20, help="with the variants in turn, at least 20 (default: 20)")
    parser.add_argument("--forward-ms", type=float, default=10.0, help="tf (default: 10)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="file for the results")
    arguments = parser.parse_args()
    named = {"full": FULL, "named": NAMED}
    arguments.cells = [cell for name in arguments.cells for cell in named.get(name) or (Cell.of(name),)]
    return arguments


def main() -> int:
    arguments = _arguments()
    began = perf_counter()
    results = measure(arguments)
    results["minutes"] = (perf_counter() - began) / 60
    write(results, arguments.json)
    print(f"\n{results['minutes']:.1f} minutes; wrote {arguments.json}")
    print("\n".join(results["failures"]) or "all of what is required holds")
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
