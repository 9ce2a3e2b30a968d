"""Regions that ``torch.jit.trace`` traces: the trace is that of the plain call."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.helpers import leaf
from torchckpt import checkpoint_layers, offload_layers


class Block(nn.Linear):
    def forward(self, x):
        return x + super().forward(x).tanh()


@pytest.mark.parametrize("how", [{}, {"budget": "95%"}, {"min_bytes": 0}], ids=str)
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_a_trace_of_regions_passes_its_own_check(device, how):
    """A budget left marks on outputs, and counted a step of it; what goes to a host was copied in the trace."""
    model = nn.Sequential(*(Block(4, 4) for _ in range(4))).to(device)
    plain, x = copy.deepcopy(model), leaf(2, 4).to(device).detach().requires_grad_()
    (offload_layers if "min_bytes" in how else checkpoint_layers)(model, Block, **how)
    traced = torch.jit.trace(model, (x,))
    received = torch.autograd.grad(traced(x).sum(), [x, *model.parameters()])
    assert all(map(torch.equal, received, torch.autograd.grad(plain(x).sum(), [x, *plain.parameters()])))
