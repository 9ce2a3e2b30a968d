"""Soak: ten thousand steps of each tool. Memory stays flat: of the process, and the number of objects and of tensors.

    python -m tests.faults.soak --steps 10000 --only Pipe

It prints a line for each tool, and ends with status 1 where something grows. The first tenth of the steps is warm-up.
"""
from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.distributed.ranks import one_rank
from tests.faults.tools import TOOLS, Training
from tests.regions.moved.calls import let_cpu_move

__all__ = ["Amounts", "grows", "soak"]

LOOKS = 10
"""How often it looks after the warm-up."""
KILOBYTES, OBJECTS, SECONDS = 4096, 200, 1.5
"""What may be more in the last half of the looks than in the first; of seconds the ratio."""


class Amounts(NamedTuple):
    kilobytes: int
    """That the process has in memory."""
    objects: int
    """That the garbage collector knows."""
    tensors: int
    seconds: float
    """Of the steps since the last look, of the processor."""


def _amounts(seconds: float) -> Amounts:
    gc.collect()
    objects = gc.get_objects()
    resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    tensors = sum(issubclass(type(one), torch.Tensor) for one in objects)
    return Amounts(int(resident.split()[1]), len(objects), tensors, seconds)


def soak(training: Training, steps: int) -> list[Amounts]:
    """Run so many steps, and look now and then."""
    looks = []
    for part in range(LOOKS + 1):
        began = time.process_time()
        for _ in range(max(1, steps // (LOOKS + 1))):
            training.step()
        if part:
            looks.append(_amounts(time.process_time() - began))
    return looks


def grows(looks: Sequence[Amounts]) -> list[str]:
    """What grows: the least of the last half of the looks is more than the most of the first half."""
    half = len(looks) // 2
    first, last = looks[:half], looks[half:]
    found = []
    for name, may in (("kilobytes", KILOBYTES), ("objects", OBJECTS), ("tensors", 0)):
        before, after = (max(getattr(one, name) for one in first), min(getattr(one, name) for one in last))
        if after > before + may:
            found.append(f"{name}: {before}, then {after}")
    if min(one.seconds for one in last) > SECONDS * max(one.seconds for one in first):
        found.append(f"seconds: {[round(one.seconds, 3) for one in looks]}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--only", choices=list(TOOLS), nargs="*", default=list(TOOLS))
    options = parser.parse_args(arguments)
    status = 0
    with one_rank(), pytest.MonkeyPatch.context() as patched:
        let_cpu_move(patched)
        for name in options.only:
            torch.manual_seed(0)
            looks = soak(TOOLS[name].make(2), options.steps)
            found = grows(looks)
            status |= bool(found)
            first, last = looks[0], looks[-1]
            print(f"{name:28} {options.steps} steps; resident {first.kilobytes} to {last.kilobytes} kB, objects "
                  f"{first.objects} to {last.objects}, tensors {first.tensors} to {last.tensors}; "
                  f"{'; '.join(found) or 'flat'}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
