"""Regions that ``torch.jit.trace`` traces: the trace is that of the plain call."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.helpers import leaf
from torchckpt import checkpoint_layers


class Block(nn.Linear):
    def forward(self, x):
        return x + super().forward(x).tanh()


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_a_trace_of_regions_passes_its_own_check():
    model, x = nn.Sequential(*(Block(4, 4) for _ in range(2))), leaf(2, 4)
    plain = copy.deepcopy(model)
    checkpoint_layers(model, Block)
    traced = torch.jit.trace(model, (x,))
    received = torch.autograd.grad(traced(x).sum(), [x, *model.parameters()])
    assert all(map(torch.equal, received, torch.autograd.grad(plain(x).sum(), [x, *plain.parameters()])))
