"""What runs between the forward of a pipe and its backward is in the budget, on every device."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.pipe.budget.test_steps import Residual
from tests.slow import few
from torchckpt import Pipe
from torchckpt.testing import peak_bytes


@few(1)
@pytest.mark.parametrize("stages", [1, 2])
def test_the_loss_counts(device, stages):
    layers = nn.Sequential(*(Residual() for _ in range(5)), nn.Linear(64, 2000))
    pipe = Pipe(layers, balance=[[6], [3, 3]][stages - 1], devices=[device] * stages, chunks=4, budget="90%")
    x, words = torch.randn(256, 64, device=device), torch.randint(2000, (256,), device=device)

    def step():
        pipe.zero_grad()
        nn.functional.cross_entropy(pipe(x), words).backward()

    for _ in range(4):
        step()
    report, taken = pipe.report(), peak_bytes(step, device)
    assert taken <= sum(report.budget_bytes)
    assert sum(report.measured_peak_bytes) >= 3 * 256 * 2000 * 4  # the outputs, their logarithms, a gradient
