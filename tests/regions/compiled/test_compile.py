"""torch.compile: a compiled block inside a region, and a region inside compiled code."""
from __future__ import annotations

from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import torchckpt
from tests.helpers import (
    Block,
    assert_program_transparent,
    assert_transparent,
    by_hand,
    leaf,
    plain,
)
from tests.slow import few, slow
from torchckpt import Checkpointing, checkpoint
from torchckpt.testing import count_recomputes

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # of Dynamo's own, at a graph break that a tensor with a graph crosses
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf"),
]


@few(1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_block_inside_a_region(call, device, backend):
    block = Block().to(device)
    compiled = torch.compile(block, backend=backend)
    assert_transparent(call, compiled, leaf(3, 4, device=device), modules=[block])


@few(1)
@pytest.mark.parametrize("backend", [*slow(["eager"]), "aot_eager"])
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
LONG = ("module in place", "module in two graphs")


# One that runs while modules have a global hook, as in a replay, is compiled once more from torch 2.15 on, however many
# replays there are.
@few(1)
@pytest.mark.parametrize(
    ("make", "compile_it"),
    [pytest.param(*ways, marks=pytest.mark.slow if name in LONG else (), id=name) for name, ways in COMPILED.items()],
)
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


@few(1)
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


# a region inside a compiled graph -------------------------------------------------------------------------------------


class Graphs:
    """The backend aot_eager, counted."""

    def __init__(self) -> None:
        self.made = 0
        self.runs = Counter()
        """Of the forward and of the backward."""
        self.products = Counter()
        """Matrix products that have run in each."""

    def __call__(self, graph, inputs):
        self.made += 1
        backend = aot_autograd(
            fw_compiler=self._counting("forward"),
            bw_compiler=self._counting("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )
        return backend(graph, inputs)

    def _counting(self, kind):
        def compiler(graph, inputs):
            products = sum("mm" in str(node.target) for node in graph.graph.nodes)

            def run(*args):
                self.runs[kind] += 1
                self.products[kind] += products
                return graph(*args)

            return make_boxed_func(run)

        return compiler


def stock(function, *args, **options):
    options.pop("generators", None)
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **options)


consulted = []


def save_products():
    def policy(_, operator, *args, **kwargs):
        consulted.append(operator)
        saved = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


OPTIONS = [
    {},
    {"preserve_rng_state": False},
    pytest.param({"determinism_check": "none"}, marks=pytest.mark.slow),
    {"context_fn": save_products},
]


def around(call, block, options):
    return lambda x: call(block, x.sin(), **options).cos()


def values_of(function, block, x):
    """Output and gradients, from one seed."""
    torch.manual_seed(1)
    output = function(x)
    weights = torch.arange(12, device=x.device).view(3, 4)
    gradients = torch.autograd.grad((output * weights).sum(), [x, *block.parameters()])
    return [output.detach(), *gradients]


def seen_of(call, block, x, options, fullgraph=True):
    """Output and gradients of a compiled call, and the matrix products of its forward and backward."""
    torch._dynamo.reset()
    graphs = Graphs()
    values = values_of(torch.compile(around(call, block, options), backend=graphs, fullgraph=fullgraph), block, x)
    return values, dict(graphs.products)


@few(1)
@pytest.mark.filterwarnings("ignore:Detected that context_fn")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("by_module", [*slow([False]), True])
def test_region_inside_a_full_graph_is_that_of_torch(by_module, device, options):
    block, x = Block().to(device), leaf(3, 4, device=device)
    expected = values_of(around(plain, block, {}), block, x)
    values, as_torch = seen_of(stock, block, x, options)
    expected = values if device.type == "cuda" else expected  # where compiled dropout draws other numbers
    consulted.clear()
    if by_module:
        torchckpt.checkpoint_module(block, **options)
        received, counted = seen_of(plain, block, x, {})
    else:
        received, counted = seen_of(checkpoint, block, x, options)
    assert all(map(torch.equal, received, expected))
    assert counted == as_torch
    assert counted == {"forward": 2, "backward": 6}  # 4 are the gradients
    assert bool(consulted) == ("context_fn" in options)


@few(1)
def test_region_that_compares_values_inside_a_graph_compares_nothing(device):
    block, x = Block().to(device), leaf(3, 4, device=device)
    _, counted = seen_of(checkpoint, block, x, {})
    assert counted == seen_of(checkpoint, block, x, {"determinism_check": "values"})[1]


@few(1)
def test_early_stop_is_torchs_inside_a_graph(device):
    block, x = Block().to(device), leaf(3, 4, device=device)
    received, _ = seen_of(checkpoint, block, x, {"early_stop": False})
    assert all(map(torch.equal, received, seen_of(checkpoint, block, x, {})[0]))


@few(1)
@pytest.mark.parametrize("fullgraph", [False, True])
def test_region_makes_no_break(fullgraph):
    block, x, graphs = Block(), leaf(3, 4), Graphs()
    values_of(torch.compile(around(checkpoint, block, {}), backend=graphs, fullgraph=fullgraph), block, x)
    assert (graphs.made, graphs.runs) == (1, {"forward": 1, "backward": 1})


@few(1)
def test_nested_and_keyword_regions_inside_a_full_graph(device):
    outer, inner, x = Block().to(device), Block().to(device), leaf(3, 4, device=device)

    def program(call):
        def function(x, *, scale):
            return outer(call(inner, x * scale))

        return lambda x: call(function, x, scale=0.5).cos()

    gradients, beside = [], program(plain)
    if device.type == "cuda":  # compiled dropout draws other numbers there
        beside = torch.compile(program(stock), backend="aot_eager", fullgraph=True)
    for run in beside, torch.compile(program(checkpoint), backend="aot_eager", fullgraph=True):
        torch.manual_seed(1)
        gradients.append(torch.autograd.grad(run(x).sum(), [x, *outer.parameters(), *inner.parameters()]))
    assert all(map(torch.equal, *gradients))


@few(1)
def test_checkpointed_layers_of_a_compiled_model(device):
    model, x = nn.Sequential(Block(), Block()).to(device), leaf(3, 4, device=device)
    values, as_torch = seen_of(lambda model, x: stock(model[1], stock(model[0], x)), model, x, {})
    expected = values if device.type == "cuda" else values_of(around(plain, model, {}), model, x)
    for layer in model:
        torchckpt.checkpoint_module(layer)
    received, counted = seen_of(plain, model, x, {})
    assert all(map(torch.equal, received, expected))
    assert counted == as_torch
    assert counted["backward"] > 8  # which are the gradients


@few(1)
def test_generators_cannot_be_replayed_inside_a_full_graph(device):
    block, x, options = Block().to(device), leaf(3, 4, device=device), {"generators": [torch.Generator()]}
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a region with generators="):
        seen_of(checkpoint, block, x, options)
    received, _ = seen_of(checkpoint, block, x, options, fullgraph=False)
    assert all(map(torch.equal, received, values_of(around(plain, block, {}), block, x)))


def compiled_around(call, block, **options):
    @torch.compile(backend="aot_eager", **options)
    def function(x):
        return call(block, x.sin()).cos()

    return function


@few(1)
def test_region_by_hand_inside_compiled_code(device):
    block = Block().to(device)

    def program(call, x):
        return call(block, x.sin()).cos()

    def compiled(function, *args):
        return torch.compile(lambda x: by_hand(function, x), backend="aot_eager")(*args)

    assert_program_transparent(compiled, program, leaf(3, 4, device=device), modules=[block])


def test_region_by_hand_inside_a_full_graph_says_what_works(device):
    function = compiled_around(by_hand, Block().to(device), fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a region by hand is run outside compiled graphs"):
        function(leaf(3, 4, device=device))


def test_region_inside_compiled_code_without_gradients(device):
    block, x = Block().to(device).eval(), torch.randn(3, 4, device=device)
    with torch.no_grad():
        output = compiled_around(checkpoint, block)(x)
    assert not output.requires_grad


@few(1)
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
