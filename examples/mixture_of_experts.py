"""Trains a small mixture of experts whose router picks other experts each time it is asked.

Its noise is new at every call, as that of a router which draws from the system or breaks ties as it likes. A replay
that asks it again gets other experts, so other shapes: checkpointed by torch the backward fails. With
``torchckpt.keep`` around the router nobody asks it again.

    python examples/mixture_of_experts.py
"""
from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, gelu
from torch.utils import checkpoint as torch_checkpoint

import torchckpt
from torchckpt.testing import saved_bytes

CLASSES = 4


class Router(nn.Module):
    """Picks two experts for each row, by scores with noise. Its calls are numbered, and each has noise of its own."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.score, self.calls = nn.Linear(width, experts), itertools.count()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.score(x)
        noise = torch.randn(scores.shape, generator=torch.Generator().manual_seed(next(self.calls)))
        weights, picked = (scores + noise).softmax(-1).topk(2)
        return weights / weights.sum(-1, keepdim=True), picked


class Experts(nn.Module):
    """Each row goes to the experts that the router picks, and to no other."""

    def __init__(self, width: int, experts: int, keeps: bool) -> None:
        super().__init__()
        self.router, self.keeps = Router(width, experts), keeps
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, picked = torchckpt.keep(self.router, x) if self.keeps else self.router(x)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, choices = torch.where(picked == number)
            mixed = mixed.index_add(0, rows, expert(x[rows]) * weights[rows, choices, None])
        return x + dropout(gelu(mixed), 0.1)


class Model(nn.Module):
    """Layers of experts, each called by ``call``."""

    def __init__(self, arguments: argparse.Namespace, call: Callable[..., Tensor], keeps: bool) -> None:
        super().__init__()
        width, experts = arguments.width, arguments.experts
        self.layers = nn.ModuleList(Experts(width, experts, keeps) for _ in range(arguments.layers))
        self.head, self.call = nn.Linear(width, CLASSES), call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return self.head(x)


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def by_torch(layer: nn.Module, x: Tensor) -> Tensor:
    return torch_checkpoint.checkpoint(layer, x, use_reentrant=False)


def losses(arguments: argparse.Namespace, call: Callable[..., Tensor], keeps: bool) -> tuple[list[float], int]:
    """Of each step; and the bytes that a forward saves."""
    torch.manual_seed(0)
    model = Model(arguments, call, keeps)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = []
    for _ in range(arguments.steps):
        target = torch.randint(CLASSES, (arguments.rows,))
        x = nn.functional.one_hot(target, arguments.width) + torch.randn(arguments.rows, arguments.width)
        optimizer.zero_grad()
        with saved_bytes() as saved:
            loss = cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, saved.total


def failure(run: Callable[..., Any], *args: Any) -> str:
    """The class and the first line of the error that ``run`` ends with."""
    try:
        run(*args)
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "nothing, this time"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("steps", 5), ("layers", 3), ("rows", 256), ("width", 32), ("experts", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    error = failure(losses, arguments, by_torch, False)
    expected, all_bytes = losses(arguments, plain, False)
    found, kept_bytes = losses(arguments, torchckpt.checkpoint, True)
    of_torch, _ = losses(arguments, by_torch, True)
    print("loss without checkpointing        ", *(f"{loss:.6f}" for loss in expected))
    print("torchckpt.checkpoint and keep     ", *(f"{loss:.6f}" for loss in found))
    print("torch.utils.checkpoint and keep   ", *(f"{loss:.6f}" for loss in of_torch))
    print("\nCheckpointed without keep, the router picks other experts in the replay, and the first backward fails:")
    print(error)
    same = "to the bit those" if expected == found == of_torch else "NOT those"
    print(
        f"With keep around the router the losses of {arguments.steps} steps are {same} without checkpointing, and a "
        f"forward keeps {kept_bytes / 1e6:.2f} MB in place of {all_bytes / 1e6:.2f} MB."
    )


if __name__ == "__main__":
    main()
