"""A backward that failed: torch's engine holds the branches that it had begun until its next backward, with plain
autograd, too. A Pipe holds nothing beside it."""
from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import torchckpt
from tests.slow import few
from torchckpt.regions.live import LiveStorages

SIZE, CHUNKS = 16, 4


class Block(nn.Module):
    """Two linear layers, of which a backward may fail between them."""

    fails_after = -1
    """How many backwards pass; -1: all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if hidden.requires_grad:
            hidden.register_hook(self._fail)
        return x + self.second(hidden)

    def _fail(self, gradient: Tensor) -> None:
        if self.fails_after == 0:
            raise ZeroDivisionError
        self.fails_after -= 1


class Branches(nn.Sequential):
    """Plain layers, of which each micro-batch is a branch of the graph, as in a Pipe."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(Branches, self).forward(part) for part in x.chunk(CHUNKS)])


def step_of(name: str, layers: list[Block]) -> Callable[[Tensor], object]:
    if name == "plain":
        plain = Branches(*layers)
        return lambda x: mse_loss(plain(x), x).backward()
    budget = "80%" if name == "budget" else None
    pipe = torchckpt.Pipe(nn.Sequential(*layers), [2, 2], devices=["cpu", "cpu"], chunks=CHUNKS, budget=budget)
    if name == "step":
        return lambda x: pipe.step(x, x, loss_fn=mse_loss)
    return lambda x: mse_loss(pipe(x), x).backward()


@few(1)
@pytest.mark.parametrize("name", ["plain", "pipe", "budget", "step"])
def test_what_is_held_is_let_go_of_by_any_backward(name: str) -> None:
    layers = [Block() for _ in range(4)]
    step = step_of(name, layers)
    step(torch.randn(32, SIZE))
    live = LiveStorages(torch.device("cpu"))
    with live:
        layers[2].fails_after = 1
        with pytest.raises(ZeroDivisionError):
            step(torch.randn(32, SIZE))
    layers[2].fails_after = -1
    held = []
    for _ in range(2):
        for layer in layers:
            layer.zero_grad()
        gc.collect()
        live.begin()
        held.append(live.now())
        torch.zeros((), requires_grad=True).backward()  # the engine of this thread takes what it left
    assert (held[0] > 0) == (name != "step")  # which has a backward for each micro-batch, of one branch
    assert held[1] == 0
