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
    if device.type != "cpu":
        torch.accelerator.synchronize()


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

_IMPORT = "import time, torch; start = time.perf_counter(); import torchckpt; print(time.perf_counter() - start)"


def import_milliseconds(rounds: int) -> list[float]:
    """What ``import torchckpt`` adds to ``import torch``, each in a fresh interpreter. The first compiles it, uncounted."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", _IMPORT]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True, env=environment) for _ in range(rounds + 1)]
    return [float(run.stdout) * 1e3 for run in runs[1:]]


# report -------------------------------------------------------------------------------------------------------------


def machine(device: torch.device) -> str:
    name = torch.get_device_module(device).get_device_name(device) if device.type != "cpu" else _cpu()
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{model} (one thread)"


def measure(device: torch.device, rounds: int) -> dict[str, Any]:
    microseconds = time_rounds(device, rounds)
    return {
        "machine": machine(device),
        "rounds": rounds,
        "microseconds a call": {name: percentiles(values) for name, values in microseconds.items()},
        "overhead over torch.utils.checkpoint's": percentiles(overhead(microseconds, "torch.utils.checkpoint")),
        "overhead over reentrant's": percentiles(overhead(microseconds, "torch.utils.checkpoint, reentrant")),
        "FLOPs recomputed, share of a forward": count_flops(device),
        "bytes kept": count_bytes(device),
        "import torchckpt, ms": percentiles(import_milliseconds(max(20, rounds // 2))),
    }


def show(results: dict[str, Any]) -> None:
    print(f"{results['machine']}; {results['rounds']} rounds, variants in turn; p10, median, p90\n")
    print("one call of two tiny operations, forward and backward, microseconds")
    for name, (low, median, high) in results["microseconds a call"].items():
        print(f"  {name:36}{low:8.1f}{median:8.1f}{high:8.1f}")
    required = {"overhead over torch.utils.checkpoint's": 0.40, "overhead over reentrant's": 1.0}
    for name, limit in required.items():
        low, median, high = results[name]
        print(f"  {name:36}{low:8.2f}{median:8.2f}{high:8.2f}   required: at most {limit:.2f}")
    print("\nFLOPs recomputed for a transformer block, as a share of its forward")
    for row in results["FLOPs recomputed, share of a forward"]:
        print(f"  {row['shape']:16}" + "  ".join(f"{name} {row[name]:.3f}" for name in VARIANTS))
    print("\nbytes kept between forward and backward")
    for row in results["bytes kept"]:
        print(f"  {row['shape']:16}" + "  ".join(f"{name} {row[name]:,}" for name in row if name != "shape"))
    low, median, high = results["import torchckpt, ms"]
    print(f"\nimport torchckpt, after import torch: {low:.1f} {median:.1f} {high:.1f} ms   required: at most 50")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or an accelerator, such as cuda (default: cpu)")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of timing, at least 20 (default: 40)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(torch.device(arguments.device), arguments.rounds)
    show(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
