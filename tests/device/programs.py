"""Programs: random pipelines on accelerators, each with all that one mini-batch of it leaves behind.

A program follows from its seed: layers with dropout and batch norm, skips, tensors that travel in pairs, an input of
several tensors, a balance, 1 to 4 devices in any order, micro-batches, look-ahead, and ``step()`` or one backward.
"""
from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import torchckpt
from tests.accelerator import random_states
from tests.pipe.run.test_random import Keep
from tests.pipe.skips import Pop

__all__ = ["MODES", "Program", "adversely", "program"]

MODES: Any = ["always", "except_last", "never"]
WIDTH = 6
DEVICES = [f"sim:{number}" for number in range(4)]


class First(nn.Module):
    """Takes one tensor, or two, or two and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor | None = None, *, factor: float = 1.0) -> Tensor:
        out: Tensor = self.linear(x) * factor
        return out if y is None else out + y.sin()


class Part(nn.Module):
    """One tensor in, two out."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh(), x.cos()


class Meet(nn.Module):
    """Two tensors in, one out."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + 2 * pair[1]


class OnFirst(nn.Module):
    """A layer, on the first of two tensors."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.layer(pair[0]), pair[1]


@dataclass(frozen=True)
class Program:
    """A pipeline, and a mini-batch for it."""

    module: nn.Sequential
    inputs: tuple[Tensor, ...]
    keywords: dict[str, float]
    target: Tensor
    balance: list[int]
    devices: list[str]
    chunks: int
    lookahead: int
    steps: bool

    def run(self, mode: Any) -> list[Tensor]:
        """Output or loss, gradients, buffers, and the states of all generators, on the CPU."""
        module = copy.deepcopy(self.module)
        pipe = torchckpt.Pipe(module, self.balance, self.devices, self.chunks, mode, self.lookahead)
        torch.manual_seed(7)
        inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in self.inputs]
        if self.steps:
            result = pipe.step(*inputs, self.target, loss_fn=mse_loss, **self.keywords)
        else:
            result = pipe(*inputs, **self.keywords)
            mse_loss(result, self.target.to(result.device)).backward()
        left = [result, *(leaf.grad for leaf in [*inputs, *pipe.parameters()]), *pipe.buffers()]
        states = random_states(torch.device(self.devices[0]))
        return [torch.empty(0) if one is None else one.detach().cpu() for one in left] + states


def program(seed: int, places: Sequence[str] = DEVICES) -> Program:
    """The program of this seed, on some of ``places``. Its tensors draw from PyTorch's generator, which is seeded."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    module = nn.Sequential(First(), *_layers(draw), nn.Linear(WIDTH, 2))
    stages = draw.randint(1, min(6, len(module)))
    cuts = sorted(draw.sample(range(1, len(module)), stages - 1))
    chunks = draw.randint(1, 5)
    rows = draw.randint(2 * chunks, 3 * chunks)  # batch norm wants two of each micro-batch
    used = draw.sample(places, draw.randint(1, min(len(places), stages)))
    devices = [*used, *draw.choices(used, k=stages - len(used))]
    draw.shuffle(devices)
    place = draw.choice(["cpu", places[draw.randrange(len(places))]])
    inputs = [torch.randn(rows, WIDTH).to(place) for _ in range(draw.randint(1, 2))]
    return Program(
        module=module,
        inputs=tuple(x.requires_grad_(draw.random() < 0.5) for x in inputs),
        keywords={"factor": 0.5} if draw.random() < 0.3 else {},
        target=torch.randn(rows, 2),
        balance=[end - start for start, end in zip([0, *cuts], [*cuts, len(module)])],
        devices=devices,
        chunks=chunks,
        lookahead=draw.randint(1, 3),
        steps=draw.random() < 0.4,
    )


def _layers(draw: random.Random) -> Iterator[nn.Module]:
    skips: list[str] = []
    is_pair = False
    for number in range(draw.randint(1, 8)):
        kind = draw.choice(["block", "block", "norm", "frozen", "stash", "pop", "part or meet"])
        if kind == "part or meet":
            yield Meet() if is_pair else Part()
            is_pair = not is_pair
            continue
        if kind == "stash":
            skips.append(f"skip {number}")
        if kind != "pop" or skips:
            layer = _layer(kind, skips, draw)
            yield OnFirst(layer) if is_pair else layer
    if is_pair:
        yield Meet()
    yield from (Pop(name) for name in reversed(skips))


def _layer(kind: str, skips: list[str], draw: random.Random) -> nn.Module:
    if kind == "norm":
        return nn.BatchNorm1d(WIDTH)
    if kind == "frozen":
        return nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    if kind == "stash":
        return Keep(skips[-1])
    if kind == "pop":
        return Pop(skips.pop(draw.randrange(len(skips))))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(WIDTH))


@contextmanager
def adversely(sim: Any, seed: int) -> Iterator[None]:
    """Operators start late, and the threads of the host take turns at other moments, as follows from ``seed``."""
    draw = random.Random(seed)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(draw.choice([usual, 1e-5]))
    try:
        with sim.delays(seed, most_seconds=draw.choice([0.0003, 0.001, 0.003]), share=draw.choice([0.1, 0.3, 0.6])):
            yield
    finally:
        sys.setswitchinterval(usual)
