"""Layers that are compiled: while a step is counted, they run compiled, also inside of regions of their own."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from torchckpt import Pipe, checkpoint_module


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.linear(x)).sin()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which Dynamo looks at
@pytest.mark.parametrize("is_region", [False, True], ids=["plain", "region"])
def test_the_counted_step_runs_compiled_layers_compiled(is_region, fresh_dynamo):
    ran: list[int] = []

    def backend(graph, _):
        def run(*args):
            ran.append(1)
            return graph(*args)

        return run

    blocks = [Block() for _ in range(4)]
    for block in blocks:
        if is_region:
            checkpoint_module(block)
        block.compile(backend=backend)
    pipe = Pipe(nn.Sequential(*blocks), [2, 2], devices=["cpu", "cpu"], chunks=2, budget="90%")
    pipe(torch.randn(64, 8)).sum().backward()
    assert len(ran) == 4 * 2 * 2  # layers, micro-batches, a forward and a replay
    pipe(torch.randn(64, 8)).sum().backward()  # operators of compiled code would have had it refuse its own share


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_pipe_that_compiled_code_calls_leaves_the_thread_as_it_was(fresh_dynamo):
    """Such a call puts back the dispatch keys of its begin: behind it a thread without the mode could make no tensor,
    and one with it did not look at operators."""
    blocks = [Block() for _ in range(4)]
    pipe = Pipe(nn.Sequential(*blocks), [2, 2], devices=["cpu", "cpu"], chunks=2, budget="90%")
    compiled = torch.compile(pipe, backend="eager")
    weights = list(pipe.parameters())
    for call in (pipe, compiled, compiled, pipe):
        x = torch.randn(64, 8)
        gradients = torch.autograd.grad(call(x).sum(), weights)
        plain = torch.autograd.grad(sum(nn.Sequential(*blocks)(half).sum() for half in x.chunk(2)), weights)
        assert all(map(torch.equal, gradients, plain))
