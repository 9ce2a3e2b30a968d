"""Trains a small GPT three ways: as it is, with its blocks recomputed, and with what they save on the host.

The losses are equal to the last bit. What is on the device differs, and the time.

    python examples/offload_gpt.py              # on the accelerator, or else on the CPU, where there is nothing to move
    python examples/offload_gpt.py --every 2    # every second block goes: for a slow link
"""
from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS computes the same bits each time

import torch
from gpt.model import Block, Size, gpt
from gpt.text import VOCABULARY, Text
from torch import nn
from torch.nn.functional import cross_entropy

import torchckpt

FULL = Size(blocks=12, width=256, heads=8, length=256, rows=16, chunks=1)
QUICK = Size(blocks=6, width=32, heads=2, length=64, rows=8, chunks=1)


class Trained(NamedTuple):
    losses: list[float]
    weights: list[torch.Tensor]
    peak_bytes: int
    """Of the last step, above what was there before it; 0 on the CPU, which does not count."""
    step_seconds: float
    """Of the last step."""


def main() -> None:
    options = parsed_options()
    size = QUICK if options.quick else FULL
    torch.manual_seed(0)
    model = gpt(size).to(options.device)
    least = 1024 if options.quick else 2**20
    ways: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
        "plain": lambda model: nullcontext(),
        "checkpoint_layers": lambda model: torchckpt.checkpoint_layers(model, Block),
        "offload_layers": lambda model: torchckpt.offload_layers(model, Block, every=options.every, min_bytes=least),
    }
    trained = {name: train(copy.deepcopy(model), way, size, options) for name, way in ways.items()}
    print(f"A GPT of {size.blocks} blocks on {options.device}, {options.steps} steps\n")
    print(f"{'':18} {'last loss':>12} {'equal to plain':>15} {'peak of a step, MiB':>20} {'seconds':>8}")
    plain = trained["plain"]
    for name, one in trained.items():
        same = one.losses == plain.losses and all(map(torch.equal, one.weights, plain.weights))
        peak = f"{one.peak_bytes / 2**20:.2f}" if one.peak_bytes else "-"
        print(f"{name:18} {one.losses[-1]:12.8f} {'yes' if same else 'NO':>15} {peak:>20} {one.step_seconds:8.3f}")
        if not same:
            sys.exit(f"{name} trains other than plain")


def train(
    model: nn.Module, way: Callable[[nn.Module], AbstractContextManager[Any]], size: Size, options: argparse.Namespace
) -> Trained:
    text, optimizer, losses = Text(), torch.optim.AdamW(model.parameters()), []
    with way(model):
        for step in range(options.steps):
            x, target = text.batch(step, size.rows, size.length, options.device)
            before, start = begin(options.device), time.perf_counter()
            torch.manual_seed(step)
            loss = cross_entropy(model(x).view(-1, VOCABULARY), target.view(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seconds = time.perf_counter() - start
    peak = torch.accelerator.max_memory_allocated(options.device) - before if before else 0
    return Trained(losses, [parameter.detach() for parameter in model.parameters()], peak, seconds)


def begin(device: str) -> int:
    """The bytes on the device before a step, which begins here; 0 on the CPU."""
    if torch.device(device).type == "cpu":
        return 0
    torch.accelerator.synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    return int(torch.accelerator.memory_allocated(device))


def parsed_options() -> argparse.Namespace:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=f"{accelerator.type}:0" if accelerator else "cpu")
    parser.add_argument("--every", type=int, default=1, help="of the blocks, every n-th goes to the host (default: 1)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="a model of seconds")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps is below 1: {options.steps}")
    return options


if __name__ == "__main__":
    main()
