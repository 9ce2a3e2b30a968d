"""A region inside of compiled code that Dynamo cannot trace: ours, outside of the graph."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.helpers import leaf
from tests.scripts import run
from tests.slow import few, slow_but
from torchckpt import checkpoint, checkpoint_module, is_recomputing
from torchckpt.testing import count_recomputes

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # of Dynamo's own, at a graph break that a tensor with a graph crosses
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf"),
]


class Block(nn.Module):
    def __init__(self, breaks, guards):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.spectral = nn.utils.spectral_norm(nn.Linear(4, 4))
        self.breaks, self.guards, self.calls, self.seen = breaks, guards, 0, []

    def forward(self, x):
        if self.guards and not is_recomputing():
            self.calls += 1
        hidden = self.norm(self.linear(x)).tanh()
        if self.breaks:
            torch._dynamo.graph_break()
            self.seen.append(is_recomputing())
        return self.dropout(self.spectral(hidden)).sin()


def by_call(block):
    return lambda x: checkpoint(block, x * 2).cos()


def by_module(block):
    checkpoint_module(block)
    return lambda x: block(x * 2).cos()


def in_a_region(block):
    return lambda x: checkpoint(lambda x, block: checkpoint(block, x), x * 2, block).cos()


def values(function, block, x):
    torch.manual_seed(1)
    seen = []
    for _ in range(3):
        output = function(x)
        seen += [output.detach(), *torch.autograd.grad(output.sum(), [x, *block.parameters()])]
    return seen + [buffer.clone() for buffer in block.buffers()]


AROUND = [by_call, by_module, in_a_region]
BROKEN = [(True, False), (False, True), (True, True)]
QUICK = [("aot_eager", *how, around) for how, around in zip(BROKEN * 2, [*AROUND, *AROUND[1:], AROUND[0]])]


@few(1)
@pytest.mark.parametrize(
    ("backend", "breaks", "guards", "around"),
    slow_but(QUICK, [(backend, *how, way) for backend in ("eager", "aot_eager") for how in BROKEN for way in AROUND]),
)
def test_it_is_ours(backend, breaks, guards, around):
    block, x = Block(breaks, guards), leaf(3, 4)
    twin = copy.deepcopy(block)
    function = torch.compile(around(block), backend=backend)
    with count_recomputes() as recomputes:
        received = values(function, block, x)
    assert all(map(torch.equal, received, values(lambda x: twin(x * 2).cos(), twin, x)))
    assert recomputes.total == (6 if around is in_a_region else 3)
    assert block.calls == twin.calls
    assert set(block.seen) == ({False, True} if breaks else set())


REPLACED = """
import torch, torch.utils.checkpoint
import torchckpt
torch.utils.checkpoint.checkpoint = torchckpt.checkpoint
from torch.utils.checkpoint import checkpoint
from torchckpt.testing import count_recomputes

linear, norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)

def block(x, breaks):
    hidden = norm(linear(x)).tanh()
    if breaks:
        torch._dynamo.graph_break()
    return hidden.sin()

x = torch.randn(3, 4, requires_grad=True)
module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
torchckpt.checkpoint_module(module)
for breaks, total in (False, 0), (True, 1):
    expected = torch.autograd.grad(block(x, breaks).sum(), [x, linear.weight])
    function = torch.compile(lambda x: checkpoint(block, x, breaks, use_reentrant=False), backend="aot_eager")
    with count_recomputes() as recomputes:
        received = torch.autograd.grad(function(x).sum(), [x, linear.weight])
    assert all(map(torch.equal, received, expected))
    assert recomputes.total == total
    assert torch.compile(module, backend="aot_eager", fullgraph=True)(x).requires_grad
assert norm.num_batches_tracked == 4
with count_recomputes() as recomputes:
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    torch.utils.checkpoint.checkpoint_sequential(layers, 2, x, use_reentrant=False).sum().backward()
assert recomputes.total == 1
print("replaced")
"""


def test_torchs_function_replaced_in_a_whole_process():
    done = run("-c", REPLACED)
    assert done.stdout.strip() == "replaced", done.stderr
