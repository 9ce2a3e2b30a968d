"""Models of unlike layers, and steps of them in both ways: ``Pipe.step`` and ``loss.backward()``."""
from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from torchckpt import BudgetInfeasible, Pipe
from torchckpt.pipe.skip import pop, stash

__all__ = ["MODELS", "WAYS", "Raises", "Wide", "budgeted", "mixed", "pair", "state", "step", "wide"]

WAYS = ("step", "graph")
SIZE = 16


class Wide(nn.Module):
    """A residual block of its own width, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.parts = nn.Sequential(nn.Linear(SIZE, width), nn.GELU(), nn.Dropout(0.2), nn.Linear(width, SIZE))

    def forward(self, x):
        return x + self.parts(self.norm(x))


class Raises(Wide):
    fails: Any = None

    def forward(self, x):
        if self.fails is not None:
            raise self.fails
        return super().forward(x)


class Stashes(Wide):
    def forward(self, x):
        x = super().forward(x)
        stash("skip", x)
        return x


class StashesMore(Wide):
    def forward(self, x):
        stash("more", x.tanh())
        return super().forward(x)


class Pops(Wide):
    def forward(self, x):
        return super().forward(x + pop("more"))


class PopsFar(Wide):
    def forward(self, x):
        return super().forward(x) * pop("skip").sigmoid()


class Doubles(Wide):
    """Changes its input in place."""

    def forward(self, x):
        return super().forward(x.mul_(2))


class View(Wide):
    """Returns a view of its input, and does something that is saved."""

    def forward(self, x):
        self.seen = x.detach().sin()
        return x.view(x.shape)


class Forks(Wide):
    def forward(self, x):
        return {"x": super().forward(x), "y": x.tanh()}


class Merges(Wide):
    def forward(self, both):
        return super().forward(both["x"]) + both["y"]


def wide():
    return nn.Sequential(*(Wide(SIZE * (1 + number % 3)) for number in range(6)))


def mixed():
    small = [nn.Linear(SIZE, 2 * SIZE), nn.ReLU(inplace=True), nn.Linear(2 * SIZE, SIZE)]
    return nn.Sequential(*small, Wide(32), nn.ReLU(inplace=True), Wide(48), nn.Dropout(0.1), Wide(16), *small[::-2])


MODELS = {
    "wide": (wide, [3, 3]),
    "three stages": (wide, [1, 3, 2]),
    "one stage": (wide, [6]),
    "skips": (lambda: nn.Sequential(Stashes(32), StashesMore(48), Wide(16), Pops(32), Wide(64), PopsFar(16)), [4, 2]),
    "in place": (lambda: nn.Sequential(Wide(32), Doubles(16), View(16), Doubles(48), Wide(64), Doubles(16)), [4, 2]),
    "several tensors": (lambda: nn.Sequential(Wide(32), Forks(16), Merges(48), Forks(32), Merges(64)), [2, 3]),
    "norms": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.GELU()) for _ in "1234")),
        [2, 2],
    ),
}


def pair(name: str, budget: Any, chunks: int = 4, **options: Any):
    """A pipe without a budget that keeps everything, and one with; of equal layers."""
    make, balance = MODELS[name]
    torch.manual_seed(0)
    model = make()
    devices = ["cpu"] * len(balance)
    options = {"deferred_batch_norm": True, **options}
    plain = Pipe(copy.deepcopy(model), balance, devices, chunks, checkpoint="never", **options)
    return plain, Pipe(model, balance, devices, chunks, budget=budget, **options)


def budgeted(name: str, way: str, share: str, chunks: int = 4):
    """Likewise, with a budget that is enough."""
    _, pipe = pair(name, share, chunks)
    x = torch.randn(16, SIZE)
    try:
        for _ in range(2):
            step(pipe, x, way)
    except BudgetInfeasible as error:
        return pair(name, error.least_bytes * 1.01, chunks)
    return pair(name, share, chunks)


def step(pipe: Any, x: torch.Tensor, way: str, seed: int = 1):
    """A step. Returns the loss and all gradients, and leaves none."""
    torch.manual_seed(seed)
    if way == "step":
        loss = pipe.step(x, x, loss_fn=mse_loss)
    else:
        output = pipe(x)
        loss = (output - x.to(output.device)).square().mean()
        loss.backward()
    found = [loss.detach(), *(one.grad for one in pipe.parameters())]
    pipe.zero_grad()
    return found


def state(pipe: nn.Module):
    return [*pipe.state_dict().values(), torch.get_rng_state()]
