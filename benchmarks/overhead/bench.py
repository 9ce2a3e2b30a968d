"""What does one checkpointed region cost? Time per call, FLOPs, bytes and import time, beside the alternatives."""
from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

import torchckpt
from benchmarks.devices import chosen, name_of
from benchmarks.machine import machine, processor
from benchmarks.options import options, write
from benchmarks.transformer import Block, written_out
from benchmarks.turns import in_turn, spread

stock = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
reentrant = partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)


def plain(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


VARIANTS: dict[str, Callable[..., Any]] = {
    "no checkpointing": plain,
    "torch.utils.checkpoint": stock,
    "torch.utils.checkpoint, reentrant": reentrant,
    "torchckpt": torchckpt.checkpoint,
}

REQUIRED_OVERHEAD = {"torch.utils.checkpoint": 0.40, "torch.utils.checkpoint, reentrant": 1.00}


# time ---------------------------------------------------------------------------------------------------------------


def two_tiny_ops(x: Tensor) -> Tensor:
    return (x * 2).sin()


def steps(device: torch.device) -> dict[str, Callable[[], None]]:
    """One forward and backward of two tiny operations, per variant."""
    x, gradient = torch.randn(4, 4, device=device, requires_grad=True), torch.ones(4, 4, device=device)

    def step(call: Callable[..., Any]) -> None:
        call(two_tiny_ops, x).backward(gradient)

    return {name: partial(step, call) for name, call in VARIANTS.items()}


def time_rounds(device: torch.device, rounds: int, calls: int = 200) -> dict[str, list[float]]:
    """Microseconds per call, in ``rounds`` rounds, each with all variants in turn."""
    gc.disable()  # collect only between rounds
    try:
        seconds = in_turn(steps(device), rounds, calls, warm_up=1)
    finally:
        gc.enable()
    return {name: [one * 1e6 for one in values] for name, values in seconds.items()}


def overhead(microseconds: dict[str, list[float]], over: str) -> list[float]:
    """For each round: the time that torchckpt adds to no checkpointing, over the time that ``over`` adds."""
    none = microseconds["no checkpointing"]
    return [
        (ours - base) / (other - base) for ours, other, base in zip(microseconds["torchckpt"], microseconds[over], none)
    ]


# FLOPs and bytes ----------------------------------------------------------------------------------------------------


SHAPES = [(2, 64, 128, 4), (4, 256, 256, 8), (1, 512, 512, 8)]
"""Batch, sequence, width, heads."""


def flops(call: Callable[..., Any], block: Block, x: Tensor) -> int:
    with torchckpt.testing.flops() as counted:
        call(block, x).sum().backward()
    return counted.total


def count_flops(device: torch.device) -> list[dict[str, Any]]:
    """Recomputed FLOPs, as a share of the FLOPs of the block's forward."""
    rows = []
    for batch, sequence, width, heads in SHAPES:
        block = Block(width, heads, written_out).to(device)
        x = torch.randn(batch, sequence, width, device=device, requires_grad=True)
        with torchckpt.testing.flops() as forward, torch.no_grad():
            block(x)
        none = flops(plain, block, x)
        shares = {name: (flops(VARIANTS[name], block, x) - none) / forward.total for name in VARIANTS}
        rows.append({"shape": f"{batch} x {sequence} x {width}", **shares})
    return rows


def count_bytes(device: torch.device) -> list[dict[str, Any]]:
    """Bytes kept between forward and backward, and the bytes of the block's input (the boundary)."""
    rows = []
    for batch, sequence, width, heads in SHAPES:
        block = Block(width, heads, written_out).to(device)
        x = torch.randn(batch, sequence, width, device=device)
        row: dict[str, Any] = {"shape": f"{batch} x {sequence} x {width}", "boundary": x.nbytes}
        for name, call in VARIANTS.items():
            if name.endswith("reentrant"):  # reentrant checkpointing needs an input that requires gradients
                continue
            with torchckpt.testing.saved_bytes() as saved:
                call(block, x)
            row[name] = saved.total
        rows.append(row)
    return rows


# import -------------------------------------------------------------------------------------------------------------

# All public names, too: each is imported lazily, when it is first used.
_IMPORT = (  # a garbage collection of torch's objects would take longer than the import
    "import gc, time, torch; gc.disable(); start = time.perf_counter(); from torchckpt import *; "
    "print(time.perf_counter() - start)"
)


def import_milliseconds(rounds: int) -> list[float]:
    """Milliseconds that an import of all of torchckpt adds to ``import torch``, each in a fresh interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    options = {"env": environment, "cwd": Path(__file__).parents[2]}
    run = partial(subprocess.run, [sys.executable, "-c", _IMPORT], stdout=subprocess.PIPE, check=True, **options)
    run()  # the first run writes the bytecode files
    return [float(run().stdout) * 1e3 for _ in range(rounds)]


# report -------------------------------------------------------------------------------------------------------------


def measure(device: torch.device, rounds: int, imports: int) -> dict[str, Any]:
    microseconds = time_rounds(device, rounds)
    is_cpu = device.type == "cpu"
    return {
        "machine": {"device": processor() if is_cpu else name_of(device), **machine()},
        "rounds": rounds,
        "microseconds a call": {name: spread(values) for name, values in microseconds.items()},
        "overhead": {over: spread(overhead(microseconds, over)) for over in REQUIRED_OVERHEAD},
        "FLOPs recomputed, share of a forward": count_flops(device),
        "bytes kept": count_bytes(device),
        **({"import torchckpt, ms": spread(import_milliseconds(imports))} if is_cpu else {}),
    }


def show(results: dict[str, Any]) -> None:
    print(", ".join(f"{key}: {value}" for key, value in results["machine"].items()))
    print(f"one thread, {results['rounds']} rounds with the variants in turn\n")
    print(f"{'two tiny operations, forward + backward':58}{'p10':>10}{'median':>8}{'p90':>8}   required")
    for name, values in results["microseconds a call"].items():
        print(f"  {name + ', µs':56}{_cells(values, 1)}")
    for name, values in results["overhead"].items():
        print(f"  {'torchckpt adds, over ' + name:56}{_cells(values, 3)}   at most {REQUIRED_OVERHEAD[name]:.2f}")
    if "import torchckpt, ms" in results:  # which no device changes
        imported = _cells(results["import torchckpt, ms"], 1)
        print(f"{'import of all of torchckpt, after torch, ms':58}{imported}   at most 50")
    _show_rows("FLOPs recomputed, share of a forward", results, ".3f", "torchckpt at most torch.utils.checkpoint")
    _show_rows("bytes kept", results, ",", "torchckpt equal to the boundary")


def _cells(values: Sequence[float], digits: int) -> str:
    return "  " + "".join(f"{value:8.{digits}f}" for value in values)


def _show_rows(title: str, results: dict[str, Any], form: str, required: str) -> None:
    print(f"\n{title}, of a transformer block (batch x sequence x width); required: {required}")
    for row in results[title]:
        cells = (f"{name} {value:{form}}" for name, value in row.items() if name != "shape")
        print(f"  {row['shape']:14}" + "; ".join(cells))


def main() -> None:
    arguments = options(__doc__, rounds=40).parse_args()
    device = chosen(arguments.device)
    torch.set_num_threads(1)
    imports = 2 if arguments.rehearse else max(20, arguments.rounds // 2)
    results = measure(device, arguments.rounds, imports)
    show(results)
    write(results, arguments.json)


if __name__ == "__main__":
    main()
