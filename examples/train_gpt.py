"""Trains a small GPT on the sources of Python's standard library: the same training, with and without recomputation.

Two stages, several micro-batches. First all variants make the same steps, side by side: without checkpointing, with
``torch.utils.checkpoint``, and with ``torchckpt``. Then torchckpt's goes on alone, and writes some text.

    python examples/train_gpt.py
"""
from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

# Both are read when torch starts. Waiting threads do not spin: they would take the cores from whoever shares them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# cuBLAS computes the same bits each time.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from gpt.memory import bytes_alive, kept_bytes
from gpt.model import Size
from gpt.table import MIB, Measured, table
from gpt.text import Text, decode, encode
from gpt.variants import TORCHCKPT, Variant, variants
from torch import Tensor

from torchckpt import Pipe
from torchckpt.testing import flops

FULL = Size(blocks=6, width=128, heads=4, length=128, rows=16, chunks=8)
QUICK = Size(blocks=4, width=32, heads=2, length=64, rows=8, chunks=4)

NOTE = """
Kept: what autograd saves from the forward for the backward. Peak: activations and gradients. Neither counts parameters.
In each stage torchckpt holds one micro-batch that is recomputed ahead of its gradient. That hides time where the stages
have devices of their own. Where they share a CPU it hides nothing, and shows as a peak above torch.utils.checkpoint's.
"""

Batches: TypeAlias = Callable[[int], tuple[Tensor, Tensor]]
"""The mini-batch of each step."""


def main() -> None:
    start, options = time.perf_counter(), parsed_options()
    size = QUICK if options.quick else FULL
    devices = two_devices(options.device)
    batches = partial(Text().batch, rows=size.rows, length=size.length, device=devices[0])
    contenders = variants(size, devices, seed=0)
    print(f"A GPT of {size.blocks} blocks; 2 stages on {' and '.join(devices)}; {size.chunks} micro-batches.\n")

    measured = compare(contenders, batches, options.compare)
    print(table(measured, options.compare))
    print(NOTE)
    check(measured)

    ours = next(variant for variant in contenders if variant.name == TORCHCKPT)
    train(ours, batches, range(options.compare, options.steps), start + options.seconds)
    print("\n" + sample(ours.pipe, "def ", 20 if options.quick else 300, size.length), end="\n\n")

    print(closing(measured))


def compare(contenders: Sequence[Variant], batches: Batches, steps: int) -> list[Measured]:
    """All make the same steps, in turns, so that whatever else the machine does slows each of them alike."""
    seconds: dict[Variant, list[float]] = {variant: [] for variant in contenders}
    for step in range(steps):
        for variant in contenders:
            seconds[variant].append(timed_step(variant, batches(step), step))
    gradients = contenders[0].gradients()
    return [measure(variant, gradients, seconds[variant], batches(steps), seed=steps) for variant in contenders]


def timed_step(variant: Variant, batch: tuple[Tensor, Tensor], seed: int) -> float:
    start = time.perf_counter()
    variant.step(batch, seed)
    variant.wait()
    return time.perf_counter() - start


def measure(
    variant: Variant, gradients: list[Tensor], seconds: list[float], batch: tuple[Tensor, Tensor], seed: int
) -> Measured:
    """What can be counted of one more step, and whether the gradients of the last one are ``gradients``."""
    equal = all(torch.equal(ours, plain) for ours, plain in zip(variant.gradients(), gradients, strict=True))
    with flops() as counted:
        loss = variant.loss(batch, seed)
        loss.backward()
    return Measured(
        name=variant.name,
        loss=loss.item(),
        gradients_equal=equal,
        kept_bytes=kept_bytes(variant, batch[0]),
        curve=bytes_alive(variant, batch, seed),
        step_flops=counted.total,
        step_seconds=statistics.median(seconds),
    )


def check(measured: list[Measured]) -> None:
    if any(m.loss != measured[0].loss for m in measured):
        sys.exit("The losses differ: recomputation has changed the training.")
    if not all(m.gradients_equal for m in measured):
        sys.exit("The gradients differ: recomputation has changed the training.")


def train(variant: Variant, batches: Batches, steps: range, deadline: float) -> None:
    """Go on for these steps, or until the time is over."""
    start = time.perf_counter()
    for done, step in enumerate(steps, 1):
        x, y = batches(step)
        loss, now = variant.step((x, y), step), time.perf_counter()
        over = step == steps[-1] or now > deadline
        if over or (step + 1) % 10 == 0:
            print(f"step {step + 1:4}   loss {loss:.3f}   {done * x.numel() / (now - start):,.0f} tokens/s", flush=True)
        if over:
            break


@torch.no_grad()
def sample(pipe: Pipe, text: str, characters: int, length: int) -> str:
    """``text``, continued."""
    pipe.eval()
    codes = encode(text)[None]
    for _ in range(characters):
        logits = pipe(codes[:, -length:])[:, -1]
        following = torch.multinomial((logits / 0.8).softmax(-1), 1)
        codes = torch.cat([codes, following.cpu()], dim=1)
    return decode(codes[0])


def closing(measured: list[Measured]) -> str:
    """What was shown, in two sentences."""
    plain, _, ours, _ = measured
    peaks = f"{ours.curve.peak / MIB:.0f} MiB in place of {plain.curve.peak / MIB:.0f}"
    more = ours.step_flops / plain.step_flops - 1
    return (
        "Recomputation changed no bit of the loss and the gradients.\n"
        f"With {ours.name} a step takes {peaks}, for {more:.0%} more FLOPs."
    )


def two_devices(kind: str) -> list[str]:
    """Where the two stages are: on the CPU, on two accelerators, or both on the one that there is."""
    if kind == "cpu":
        return ["cpu", "cpu"]
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != kind:
        sys.exit(f"--device {kind}: there is none here; --device {found.type if found else 'cpu'} would work")
    return [f"{kind}:0", f"{kind}:{min(1, torch.accelerator.device_count() - 1)}"]


def parsed_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu (default), or cuda: two GPUs, or both stages on one")
    parser.add_argument("--compare", type=int, default=8, help="steps that all variants make (%(default)s)")
    parser.add_argument("--steps", type=int, default=110, help="steps that torchckpt's makes in all (%(default)s)")
    parser.add_argument("--seconds", type=float, default=90, help="from the start, for all steps (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and a few steps, to see that all works")
    options = parser.parse_args()
    if options.quick:
        options.compare, options.steps = 2, 6
    return options


if __name__ == "__main__":
    main()
