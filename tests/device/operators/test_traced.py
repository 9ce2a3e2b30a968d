"""Regions under a mode of a trace, where an accelerator is in use: tensors have no values there."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import torchckpt
from tests.graph.eager import compare
from torchckpt import graph


class Regions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torchckpt.checkpoint(layer, x)
        return x


def test_regions_in_a_traced_step_on_the_cpu(sim):
    """The machine's accelerator is a device of every region as soon as it was used."""
    torch.ones(3, device="sim:0").add(1)
    model, x = Regions(), torch.randn(2, 4, requires_grad=True)
    compare(model, graph.rematerialize(model, x, keep="memory"), x)


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_regions_of_fake_tensors(sim, device):
    torch.ones(3, device="sim:0").add(1)
    with FakeTensorMode():
        with torch.device(device):
            model, x = Regions(), torch.randn(2, 4, requires_grad=True)
        model(x).sum().backward()
        assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())
        assert x.grad.device == torch.device(device)
