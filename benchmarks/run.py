"""Run every ``benchmarks/*/bench.py``, and write the results to ``benchmarks/results/<device>.json``.

    python benchmarks/run.py                           # all benchmarks, on the accelerator, or else on the CPU
    python benchmarks/run.py --only graph --parts exactness    # options unknown here are passed to the benchmarks
    python benchmarks/run.py --rehearse                # do they all run? without a GPU: on the simulated device

The file is written after each benchmark; results of other benchmarks in it are kept.
"""
from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

HERE = Path(__file__).parent
NAMES = [file.parent.name for file in sorted(HERE.glob("*/bench.py"))]
ON_PAPER = ("simulator",)
"""Benchmarks that use no device, and take no options for one."""
REHEARSED_ROUNDS = 2
UNSIMULATED = (
    "bfloat16 (float32 in its place): a layer norm of it has statistics of another dtype on the CPU",
    "models of the graph level with attention (gpt6, gpt24): the simulated device's cannot be traced",
    "running out of memory",
)
"""The parts that a rehearsal without a GPU leaves out."""


def slug(device: str) -> str:
    """The name of the device, as a file name."""
    if device in ("cpu", "sim"):
        return device
    name = torch.get_device_module(device).get_device_name(device)
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def results_of(name: str, options: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [sys.executable, str(HERE / name / "bench.py"), "--json", str(file), *options]
        subprocess.run(command, check=True)
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def run_all(names: list[str], options: list[str], file: Path) -> list[str]:
    """Run the benchmarks; return the names of those that failed. Results of the others are in ``file``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        began = perf_counter()
        try:
            found = results_of(name, [] if name in ON_PAPER else options)
        except subprocess.CalledProcessError as error:
            failed.append(f"{name} (exit status {error.returncode})")
            continue
        results = json.loads(file.read_text()) if file.exists() else {}
        results[name] = {**results.get(name, {}), **found}
        file.write_text(json.dumps(results, indent=1) + "\n")
        print(f"== {name}: {perf_counter() - began:.0f} s, written to {file}", flush=True)
    return failed


def parsed() -> tuple[argparse.Namespace, list[str]]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="default: the accelerator, or cpu; to rehearse, sim")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help=f"some of {', '.join(NAMES)}")
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/results)")
    parser.add_argument("--rehearse", action="store_true", help="small models; results go to a temporary folder")
    arguments, options = parser.parse_known_args()
    arguments.device = arguments.device or (
        accelerator.type if accelerator else "sim" if arguments.rehearse else "cpu"
    )
    if arguments.rehearse:
        options = ["--rehearse", "--rounds", str(REHEARSED_ROUNDS), *options]
    return arguments, ["--device", arguments.device, *options]


def main() -> None:
    arguments, options = parsed()
    device = arguments.device
    names = arguments.only or [name for name in NAMES if device == "cpu" or name not in ON_PAPER]
    with tempfile.TemporaryDirectory() as folder:
        out = arguments.out or (Path(folder) if arguments.rehearse else HERE / "results")
        failed = run_all(names, options, out / f"{slug(device)}.json")
    if arguments.rehearse:
        left_out = [f"{name}: it uses no device" for name in ON_PAPER]
        left_out += UNSIMULATED if device == "sim" else []
        print("not rehearsed:", *left_out, sep="\n  ")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
