"""How many instructions does one region add, over what torch adds? Counted by valgrind: the same on a loaded machine.

    python benchmarks/overhead/counted.py

Each process makes no call, or 100 after some to warm up. The difference is that of 100 calls, forward and backward.
"""
from __future__ import annotations

import argparse
import gc
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from benchmarks.overhead.bench import VARIANTS
from benchmarks.overhead.paired import FUNCTIONS

CALLS, WARM_UP = 100, 50
_VALGRIND = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")


def call(function: str, variant: str, times: int) -> None:
    """Call a function by a variant, forward and backward."""
    x, gradient = torch.randn(4, 4, requires_grad=True), torch.ones(4, 4)
    for _ in range(times):
        VARIANTS[variant](FUNCTIONS[function], x).backward(gradient)


def instructions(*arguments: str) -> int:
    """Of a process that runs this file with ``arguments``."""
    command = [*_VALGRIND, sys.executable, __file__, *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True, env=environment)
    found = re.search(r"I\s+refs:\s+([\d,]+)", run.stderr)
    if found is None:
        raise RuntimeError(f"valgrind counted nothing: {run.stderr}")
    return int(found[1].replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("call", nargs="*", help="a function, a variant and how many calls, in this process")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.call:
        function, variant, times = arguments.call
        call(function, variant, WARM_UP)
        gc.disable()
        call(function, variant, int(times))
        return
    if shutil.which("valgrind") is None:
        sys.exit("valgrind is missing: apt install valgrind")
    for function in FUNCTIONS:
        counted = {
            variant: (instructions(function, variant, str(CALLS)) - instructions(function, variant, "0")) // CALLS
            for variant in ("no checkpointing", "torch.utils.checkpoint", "torchckpt")
        }
        plain = counted.pop("no checkpointing")
        theirs, ours = (count - plain for count in counted.values())
        added = f"torch.utils.checkpoint adds {theirs:,}, torchckpt {ours:,}: {ours / theirs:.2f}"
        print(f"{function}: {plain:,} plain; {added}", flush=True)


if __name__ == "__main__":
    main()
