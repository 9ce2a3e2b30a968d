"""What a region costs: time per call, FLOPs recomputed, bytes kept, import time. Each beside its alternatives."""
from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import torchckpt

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks.devices

from benchmarks.devices import chosen, name_of, synchronize

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


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The 10th, the median, the 90th."""
    tenths = statistics.quantiles(values, n=10)
    return tenths[0], statistics.median(values), tenths[-1]


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
    """Microseconds a call: ``rounds`` rounds, the variants in turn in each."""
    runs = steps(device)
    for run in runs.values():
        _synchronised(run, calls, device)
    microseconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        gc.collect()
        for name, run in runs.items():
            timer = timeit.Timer(partial(_synchronised, run, calls, device))
            microseconds[name].append(timer.timeit(1) / calls * 1e6)
    return microseconds


def _synchronised(run: Callable[[], None], calls: int, device: torch.device) -> None:
    for _ in range(calls):
        run()
    synchronize()


def overhead(microseconds: dict[str, list[float]], over: str) -> list[float]:
    """Round by round: what ours adds to no checkpointing, over what ``over`` adds."""
    none = microseconds["no checkpointing"]
    return [
        (ours - base) / (other - base) for ours, other, base in zip(microseconds["torchckpt"], microseconds[over], none)
    ]


# FLOPs and bytes ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block without dropout: attention and MLP, each behind a LayerNorm, with residuals."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # Written out: the fused kernels are not in torch's table of FLOPs on every device.
        weights = (query @ key.mT / query.size(-1) ** 0.5).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        hidden: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))
        return hidden


SHAPES = [(2, 64, 128, 4), (4, 256, 256, 8), (1, 512, 512, 8)]
"""Batch, sequence, width, heads."""


def flops(call: Callable[..., Any], block: Block, x: Tensor) -> int:
    with torchckpt.testing.flops() as counted:
        call(block, x).sum().backward()
    return counted.total


def count_flops(device: torch.device) -> list[dict[str, Any]]:
    """FLOPs recomputed, as a share of the block's forward."""
    rows = []
    for batch, sequence, width, heads in SHAPES:
        block = Block(width, heads).to(device)
        x = torch.randn(batch, sequence, width, device=device, requires_grad=True)
        with torchckpt.testing.flops() as forward, torch.no_grad():
            block(x)
        none = flops(plain, block, x)
        shares = {name: (flops(VARIANTS[name], block, x) - none) / forward.total for name in VARIANTS}
        rows.append({"shape": f"{batch} x {sequence} x {width}", **shares})
    return rows


def count_bytes(device: torch.device) -> list[dict[str, Any]]:
    """Bytes kept between forward and backward, beside those of the boundary."""
    rows = []
    for batch, sequence, width, heads in SHAPES:
        block = Block(width, heads).to(device)
        x = torch.randn(batch, sequence, width, device=device)
        row: dict[str, Any] = {"shape": f"{batch} x {sequence} x {width}", "boundary": x.nbytes}
        for name, call in VARIANTS.items():
            if name.endswith("reentrant"):  # it runs the forward without gradients, on inputs that must have them
                continue
            with torchckpt.testing.saved_bytes() as saved:
                call(block, x)
            row[name] = saved.total
        rows.append(row)
    return rows


# import -------------------------------------------------------------------------------------------------------------

# With its names, each of which is imported when it is first asked for.
_IMPORT = (  # a collection of torch's own objects falls where it falls, and takes longer than all of the import
    "import gc, time, torch; gc.disable(); start = time.perf_counter(); from torchckpt import *; "
    "print(time.perf_counter() - start)"
)


def import_milliseconds(rounds: int) -> list[float]:
    """What importing all of torchckpt adds to ``import torch``, each in a fresh interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    run = partial(subprocess.run, [sys.executable, "-c", _IMPORT], stdout=subprocess.PIPE, check=True, env=environment)
    run()  # compiles it
    return [float(run().stdout) * 1e3 for _ in range(rounds)]


# report -------------------------------------------------------------------------------------------------------------


def machine(device: torch.device) -> dict[str, str]:
    name = _processor() if device.type == "cpu" else name_of(device)
    return {
        "device": name,
        "processor": _processor(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def measure(device: torch.device, rounds: int, imports: int) -> dict[str, Any]:
    microseconds = time_rounds(device, rounds)
    return {
        "machine": machine(device),
        "rounds": rounds,
        "microseconds a call": {name: percentiles(values) for name, values in microseconds.items()},
        "overhead": {over: percentiles(overhead(microseconds, over)) for over in REQUIRED_OVERHEAD},
        "FLOPs recomputed, share of a forward": count_flops(device),
        "bytes kept": count_bytes(device),
        "import torchckpt, ms": percentiles(import_milliseconds(imports)),
    }


def show(results: dict[str, Any]) -> None:
    print(", ".join(f"{key}: {value}" for key, value in results["machine"].items()))
    print(f"one thread, {results['rounds']} rounds with the variants in turn\n")
    print(f"{'two tiny operations, forward + backward':58}{'p10':>10}{'median':>8}{'p90':>8}   required")
    for name, values in results["microseconds a call"].items():
        print(f"  {name + ', µs':56}{_cells(values, 1)}")
    for name, values in results["overhead"].items():
        print(f"  {'torchckpt adds, over ' + name:56}{_cells(values, 3)}   at most {REQUIRED_OVERHEAD[name]:.2f}")
    imported = _cells(results['import torchckpt, ms'], 1)
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or an accelerator, such as cuda (default: cpu)")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of timing, at least 20 (default: 40)")
    parser.add_argument("--rehearse", action="store_true", help="does all of it run? few imports; no figures")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    device = chosen(arguments.device)
    torch.set_num_threads(1)
    imports = 2 if arguments.rehearse else max(20, arguments.rounds // 2)
    results = measure(device, arguments.rounds, imports)
    show(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
