"""Layouts: what a trace takes for the layout of a result is that of eager."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm, dropout

from torchckpt import graph
from torchckpt.graph.private.layouts import eager_layouts


class Normed(nn.Module):
    """A norm over the middle of three dimensions, of an input that is transposed, and what reads its layout."""

    def __init__(self, read, norm=None):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.norm, self.read = norm, read

    def forward(self, x):
        x = self.linear(x).transpose(1, 2)
        x = batch_norm(x, None, None, training=True) if self.norm is None else self.norm(x)
        return self.read(x.transpose(1, 2)).square().mean()


READS = {
    "a view": lambda x: x.reshape(8, -1),
    "a product": lambda x: x @ torch.eye(16),
    "random numbers": lambda x: dropout(x.contiguous(), 0.5),
}


@pytest.mark.parametrize("norm", [None, nn.BatchNorm1d(16), nn.BatchNorm1d(16).eval()])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_batch_norm_of_a_transposed_input_is_that_of_eager(read, norm):
    model = Normed(read, copy.deepcopy(norm))
    traced, x = copy.deepcopy(model), torch.randn(8, 12, 16)
    step = graph.rematerialize(traced, x)
    found = []
    for call, of in ((model, model), (step, traced)):
        torch.manual_seed(1)
        loss = call(x)
        loss.backward()
        found.append([loss, *(one.grad for one in of.parameters()), *of.buffers()])
    assert all(map(torch.equal, *found))


def test_nothing_is_left():
    from torch._decomp import decomposition_table

    before = dict(decomposition_table)
    with eager_layouts():
        assert decomposition_table != before
    assert decomposition_table == before
