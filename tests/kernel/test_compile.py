"""torch.compile: a compiled block inside a region, and a region inside compiled code."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import torchckpt
from tests.helpers import Block, assert_program_transparent, assert_transparent, by_hand, leaf, plain
from torchckpt import Checkpointing, checkpoint
from torchckpt.testing import count_recomputes

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # of Dynamo's own, at a graph break that a tensor with a graph crosses
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf"),
]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_block_inside_a_region(call, device, backend):
    block = Block().to(device)
    compiled = torch.compile(block, backend=backend)
    assert_transparent(call, compiled, leaf(3, 4, device=device), modules=[block])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_part_of_a_region(call, device, backend):
    block, tail = Block().to(device), Block().to(device)
    compiled = torch.compile(block, backend=backend)
    assert_transparent(call, lambda x: tail(compiled(x)).exp(), leaf(3, 4, device=device), modules=[block, tail])


class Broken(Block):
    """A block in two graphs."""

    def forward(self, input):
        hidden = self.first(input).tanh()
        torch._dynamo.graph_break()
        return self.second(hidden).sigmoid()


def compiled_in_place(module, backend):
    module.compile(backend=backend)
    return module


COMPILED = {
    "module": (Block, torch.compile),
    "module in place": (Block, compiled_in_place),
    "module in two graphs": (Broken, torch.compile),
    "module in two graphs, in place": (Broken, compiled_in_place),
    "container in place": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Tanh()), compiled_in_place),
    "function": (Block, lambda module, backend: torch.compile(lambda x: module(x), backend=backend)),
}


@pytest.mark.parametrize(("make", "compile_it"), COMPILED.values(), ids=COMPILED)
def test_what_is_compiled_is_what_is_compiled_without_the_region(call, device, make, compile_it):
    def graphs_of(call):
        torch._dynamo.reset()
        graphs = []

        def backend(graph, inputs):
            graphs.append([str(node.target) for node in graph.graph.nodes if node.op != "placeholder"])
            return graph.forward

        compiled = compile_it(make().to(device), backend=backend)
        for _ in range(3):
            call(lambda x: compiled(x).sin(), leaf(3, 4, device=device)).sum().backward()
        return graphs

    assert graphs_of(call) == graphs_of(plain)


def test_compiled_block_is_replayed_once(device):
    compiled = torch.compile(Block().to(device), backend="aot_eager")
    with count_recomputes() as recomputes:
        checkpoint(compiled, leaf(3, 4, device=device)).sum().backward()
    assert recomputes.total == 1


def test_compiled_blocks_in_nested_regions(device):
    blocks = nn.ModuleList(Block() for _ in range(2)).to(device)
    inner, outer = (torch.compile(block, backend="aot_eager") for block in blocks)

    def program(call, x):
        return call(lambda x: outer(call(inner, x)).exp(), x)

    assert_program_transparent(checkpoint, program, leaf(3, 4, device=device), modules=[blocks])


def compiled_around(call, block, **options):
    @torch.compile(backend="eager", **options)
    def function(x):
        return call(block, x.sin()).cos()

    return function


@pytest.mark.parametrize("call", [checkpoint, by_hand], ids=["checkpoint", "by_hand"])
def test_region_inside_compiled_code(call, device):
    block = Block().to(device)

    def program(call, x):
        return call(block, x.sin()).cos()

    def compiled(function, *args):
        return torch.compile(lambda x: call(function, x), backend="eager")(*args)

    assert_program_transparent(compiled, program, leaf(3, 4, device=device), modules=[block])


def test_region_inside_compiled_code_is_a_region(device):
    block, x = Block().to(device), leaf(3, 4, device=device)
    output = compiled_around(checkpoint, block)(x)
    with count_recomputes() as recomputes:
        output.sum().backward()
    assert recomputes.by_region == {"'Block'": 1}


def test_function_of_a_region_inside_compiled_code_is_not_compiled(device):
    compiling, block = [], Block().to(device)

    def function(x):
        compiling.append(torch.compiler.is_compiling())
        return block(x)

    compiled_around(checkpoint, function)(leaf(3, 4, device=device)).sum().backward()
    assert compiling == [False, False]


@pytest.mark.parametrize("call", [checkpoint, by_hand], ids=["checkpoint", "by_hand"])
def test_region_inside_a_full_graph_says_to_compile_the_block_inside(call, device):
    function = compiled_around(call, Block().to(device), fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile the block inside it instead"):
        function(leaf(3, 4, device=device))


def test_checkpointed_module_inside_compiled_code(device):
    model = nn.Sequential(Block(), Block()).to(device)
    torchckpt.checkpoint_module(model[1])
    output = torch.compile(model, backend="eager")(leaf(3, 4, device=device))
    with count_recomputes() as recomputes:
        output.sum().backward()
    assert recomputes.total == 1


def test_region_inside_compiled_code_without_gradients(device):
    block, x = Block().to(device).eval(), torch.randn(3, 4, device=device)
    with torch.no_grad():
        output = compiled_around(checkpoint, block)(x)
    assert not output.requires_grad


def test_compiled_code_around_the_methods_of_a_region(device):
    block, x = Block().to(device), leaf(3, 4, device=device)

    @torch.compile(backend="eager")
    def function(x):
        region = Checkpointing(block, x.sin())
        outputs = region.recompute(region.checkpoint())
        region.prefetch()
        return outputs, region.is_recomputed

    outputs, is_recomputed = function(x)
    with count_recomputes() as recomputes:
        outputs.sum().backward()
    assert is_recomputed
    assert recomputes.total == 0
