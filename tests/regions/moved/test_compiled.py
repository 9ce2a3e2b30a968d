"""Compiled code inside of regions that move, and such regions inside of compiled code, where the graph ends."""
from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from tests.helpers import Block, assert_program_transparent, assert_transparent, leaf
from tests.regions.compiled import test_compile
from tests.regions.moved.calls import by_default, let_cpu_move
from tests.slow import few
from torchckpt import offload_module
from torchckpt.regions.moved.region import Moved

pytestmark = test_compile.pytestmark

for name, test in list(vars(test_compile).items()):
    if name.startswith("test_") and "call" in inspect.signature(test).parameters:
        globals()[name] = test
del name, test, test_compile


@pytest.fixture
def cpu_moves(monkeypatch):
    let_cpu_move(monkeypatch)


class Deep(nn.Module):
    """Four blocks, so that the first ones are let go of."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def each_moves(model):
    for block in model.blocks:
        offload_module(block, min_bytes=1)
    return model


@few(1)
@pytest.mark.usefixtures("cpu_moves")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("first", ["offload", "compile"])
def test_compiled_blocks_that_move(monkeypatch, first, backend):
    plain = Deep()
    model, sizes, release = copy.deepcopy(plain), [], Moved.release

    def noted(self):
        release(self)
        sizes.append([storage.is_away for storage in self._moving()])

    if first == "offload":
        each_moves(model)
    for block in (*model.blocks, *plain.blocks):
        block.compile(backend=backend)
    if first == "compile":
        each_moves(model)
    monkeypatch.setattr(Moved, "release", noted)
    x = leaf(3, 4)
    torch.manual_seed(1)
    expected = torch.autograd.grad(plain(x).sum(), [x, *plain.parameters()])
    torch.manual_seed(1)
    received = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    assert all(map(torch.equal, received, expected))
    assert [all(away) and len(away) > 2 for away in sizes] == [True, True]


@pytest.mark.usefixtures("cpu_moves")
def test_a_region_ends_the_graph_and_what_is_in_it_is_compiled():
    block = Block()
    offload_module(block, min_bytes=1)
    counter = CompileCounter()

    def function(x):
        return block(x.sin()).cos()

    assert_transparent(lambda function, x: torch.compile(function, backend=counter)(x), function, leaf(3, 4))
    assert counter.frame_count >= 2  # what is before it, and what is behind it


@pytest.mark.usefixtures("cpu_moves")
def test_a_region_by_call_ends_the_graph():
    block = Block()

    def program(call, x):
        return torch.compile(lambda x: call(block, x.sin()).cos(), backend="aot_eager")(x)

    assert_program_transparent(by_default, program, leaf(3, 4), modules=[block])


def test_a_whole_graph_is_an_error_that_says_what_to_do():
    compiled = torch.compile(lambda x: by_default(torch.exp, x), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="is run outside compiled graphs, and so are offload,"):
        compiled(leaf(3))


@pytest.mark.usefixtures("cpu_moves")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_inductor():
    plain = Deep()
    model = each_moves(copy.deepcopy(plain))
    for block in (*model.blocks, *plain.blocks):
        block.compile()
    x = leaf(3, 4)
    for _ in range(2):
        torch.manual_seed(1)
        expected = torch.autograd.grad(plain(x).sum(), [x, *plain.parameters()])
        torch.manual_seed(1)
        received = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
        assert all(map(torch.equal, received, expected))
