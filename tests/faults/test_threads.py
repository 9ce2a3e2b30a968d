"""Four threads, each of which trains a model of its own by a tool: each gets what it gets alone, to the bit."""
from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchckpt
from tests.left_behind import thread_state
from tests.slow import few

STEPS, MANY, WIDTH = 10, 200, 16


class Block(nn.Module):
    """It draws from a generator of its own: threads share that of the CPU."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.Linear(64, WIDTH)
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.up(x)).relu()
        mask = torch.rand(hidden.shape, generator=self.generator) > 0.1
        return x + self.down(hidden * mask)


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(seed + n) for n in range(3)))


def of_layers(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    torchckpt.checkpoint_layers(model, Block)
    return model


def of_budget(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    torchckpt.checkpoint_layers(model, Block, budget="75%")
    return model


def of_regions(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        for block in model:
            region = torchckpt.Checkpointing(block, x)
            x = region.recompute(region.checkpoint())
        return x

    return run


def of_pipe(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    return torchckpt.Pipe(model, balance=[2, 1], chunks=2, checkpoint="always")


WAYS = (of_layers, of_budget, of_regions, of_pipe)


def trained(model: nn.Sequential, way: Callable[..., Callable[[Tensor], Tensor]], steps: int) -> list[Any]:
    """The losses of all steps, and what is there after them."""
    call, losses = way(model), []
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(value.clone() for value in model.state_dict().values())]


@few(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [STEPS, pytest.param(MANY, marks=pytest.mark.faults)])
def test_four_threads_with_a_model_each(way: Callable[..., Any], steps: int) -> None:
    alone = [trained(model_of(seed), way, steps) for seed in range(4)]
    models = [model_of(seed) for seed in range(4)]  # not in the threads: the seed is of the process
    before, threads, start = thread_state(), set(threading.enumerate()), threading.Barrier(4)

    def at_once(model: nn.Sequential) -> list[Any]:
        start.wait()
        return trained(model, way, steps)

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(at_once, models))
    assert [all(map(torch.equal, *pair)) for pair in zip(together, alone)] == [True] * 4
    assert thread_state() == before
    assert set(threading.enumerate()) <= threads
