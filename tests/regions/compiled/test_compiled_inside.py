"""Compiled code inside regions, in every order of wrapping: it runs in the forward and in the replay, counted."""
from __future__ import annotations

import copy
import pickle
from itertools import product

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from tests.helpers import Block, leaf
from tests.slow import few, slow_but
from torchckpt import Checkpointing, Pipe, checkpoint, checkpoint_module, is_recomputing
from torchckpt.errors import ArgumentError, RecomputationError
from torchckpt.testing import count_recomputes

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # of Dynamo's own, where an input of a graph is no leaf
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf"),
]


class Runs:
    """The backend eager, which counts how often its graphs run."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1

        def run(*args):
            self.runs += 1
            return graph(*args)

        return run


def module_then_compile(block, backend, **options):
    checkpoint_module(block)
    block.compile(backend=backend, **options)
    return block


def compile_then_module(block, backend, **options):
    block.compile(backend=backend, **options)
    checkpoint_module(block)
    return block


def module_of_compiled(block, backend, **options):
    compiled = torch.compile(block, backend=backend, **options)
    checkpoint_module(compiled)
    return compiled


def call_of_compiled(block, backend, **options):
    compiled = torch.compile(block, backend=backend, **options)
    return lambda x: checkpoint(compiled, x)


def ahead_of_compiled(block, backend, **options):
    compiled = torch.compile(block, backend=backend, **options)

    def run(x):
        region = Checkpointing(compiled, x)
        outputs = region.checkpoint()
        region.prefetch()
        return outputs

    return run


def call_of_compiled_in_place(block, backend, **options):
    block.compile(backend=backend, **options)
    return lambda x: checkpoint(block, x)


def call_of_compiled_method(block, backend, **options):
    block.forward = torch.compile(block.forward, backend=backend, **options)
    return lambda x: checkpoint(block, x)


ORDERS = [
    module_then_compile,
    compile_then_module,
    module_of_compiled,
    call_of_compiled,
    ahead_of_compiled,
    call_of_compiled_in_place,
    call_of_compiled_method,
]


def values_of(function, x, parameters):
    torch.manual_seed(1)
    output = function(x)
    return [output.detach(), *torch.autograd.grad(output.sin().sum(), [x, *parameters])]


@few(1)
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_compiled_code_runs_in_the_forward_and_in_the_replay(order, fullgraph):
    block, x, backend = Block(), leaf(3, 4), Runs()
    expected = values_of(block, x, block.parameters())
    function = order(block, backend, fullgraph=fullgraph)
    for step in range(3):
        with count_recomputes() as recomputes:
            received = values_of(function, x, block.parameters())
        assert all(map(torch.equal, received, expected))
        assert recomputes.total == 1
        assert backend.runs == 2 * (step + 1)
    assert backend.graphs == 1


@few(1)
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_equal_with_derivatives_that_are_compiled_too(order):
    block, x = Block(), leaf(3, 4)
    expected = values_of(block, x, block.parameters())
    function = order(block, "aot_eager")
    for _ in range(2):
        assert all(map(torch.equal, values_of(function, x, block.parameters()), expected))


@pytest.mark.parametrize("order", [module_then_compile, compile_then_module, module_of_compiled])
def test_handle_of_a_compiled_module_leaves_it_compiled(order, monkeypatch):
    handles, original = [], checkpoint_module
    monkeypatch.setitem(globals(), "checkpoint_module", lambda module: handles.append(original(module)))
    block, x, backend = Block(), leaf(3, 4), Runs()
    expected = values_of(block, x, block.parameters())
    function = order(block, backend)
    handles[0].remove()
    with count_recomputes() as recomputes:
        received = values_of(function, x, block.parameters())
    assert all(map(torch.equal, received, expected))
    assert (backend.runs, recomputes.total) == (1, 0)


@pytest.mark.parametrize("order", [module_then_compile, compile_then_module])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_is_a_region_with_its_own_weights_and_goes_without_what_was_compiled(order, copied):
    """As a copy of a compiled module of torch does."""
    x, backend = leaf(3, 4), Runs()
    block = order(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), backend)
    other = copied(block)
    with torch.no_grad():
        other[0].weight.zero_()
    values_of(block, x, block.parameters())
    assert backend.runs == 2
    with count_recomputes() as recomputes:
        output = values_of(other, x, other.parameters())[0]
    assert (backend.runs, recomputes.total) == (2, 1)
    assert torch.equal(output, other[0].bias.sigmoid().expand(3, 4))


def test_state_dict_and_names_stay():
    block = module_then_compile(Block(), "eager")
    assert list(block.state_dict()) == list(Block().state_dict())
    assert type(block).__name__ == "Block"


def test_compile_of_a_module_that_is_none_of_ours_any_more():
    block, backend = Block(), Runs()
    checkpoint_module(block).remove()
    block.compile(backend=backend)
    block(leaf(3, 4))
    assert backend.runs == 1
    assert block._compiled_call_impl is not None


ORDERS = [module_then_compile, compile_then_module, module_of_compiled, torch.compile]
QUICK = [(order, mode, mode == "always") for order in ORDERS for mode in ("except_last", "always")]


@few(1)
@pytest.mark.parametrize(
    ("order", "checkpoint_mode", "step"),
    slow_but(QUICK, product(ORDERS, ["never", "except_last", "always"], [False, True])),
)
def test_compiled_layers_of_a_pipe(order, checkpoint_mode, step):
    layers, x, backend = [Block(), Block()], torch.randn(4, 4), Runs()
    plain = nn.Sequential(*copy.deepcopy(layers))
    compiled = nn.Sequential(*(order(layer, backend=backend) for layer in layers))

    def gradients(model):
        torch.manual_seed(1)
        pipe = Pipe(model, [1, 1], chunks=2, checkpoint=checkpoint_mode)
        if step:
            pipe.step(x, torch.zeros(4, 4), loss_fn=nn.functional.mse_loss)
        else:
            pipe(x).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(plain)
    with count_recomputes() as recomputes:
        received = gradients(compiled)
    assert all(map(torch.equal, received, expected))
    assert backend.runs >= 4 + recomputes.total - (4 if order is not torch.compile else 0)
    assert backend.runs > 4 or checkpoint_mode == "never"


def test_a_compiled_forward_that_cannot_be_compiled_again_is_an_error():
    block = Block()
    block._compiled_call_impl = lambda x: x
    with pytest.raises(ArgumentError) as caught:
        checkpoint_module(block)
    assert str(caught.value).endswith("works:    checkpoint_module(module), and then module.compile()")


def test_counter_of_torch_sees_one_frame():
    counter = CompileCounter()
    block, x = module_then_compile(Block(), counter), leaf(3, 4)
    for _ in range(3):
        block(x).sum().backward()
    assert (counter.frame_count, counter.op_count > 0) == (1, True)


class Scaled(nn.Linear):
    def forward(self, x, scale=1.0):
        return super().forward(x) * scale


def test_a_number_that_is_dynamic():
    """Dynamo makes a tensor of it, of version 0 in the call that compiles, and of version 1 in the replay."""
    torch.manual_seed(0)
    block, x = Scaled(4, 4), leaf(3, 4)
    expected = torch.autograd.grad(block(x).sin().sum(), x)
    outputs = checkpoint(torch.compile(block, backend="aot_eager", dynamic=True), x)
    assert torch.autograd.grad(outputs.sin().sum(), x)[0].equal(expected[0])


MADE = {
    "arange": lambda x: nn.functional.embedding(torch.arange(4), x),
    "linspace": lambda x: x * torch.linspace(0, 1, 4),
    "eye": lambda x: x * torch.eye(4),
    "rand": lambda x: x * torch.rand(4),
    "randperm": lambda x: x[torch.randperm(4)],
}


@few(1)
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_a_tensor_that_compiled_code_makes(make):
    """As that of a number: torch counts versions otherwise in the call that compiles."""
    x, made = leaf(4, 4), torch.compile(lambda x: make(x).sin(), backend="aot_eager")
    for _ in range(2):  # the first compiles
        torch.manual_seed(0)
        (expected,) = torch.autograd.grad(make(x).sin().sum(), x)
        torch.manual_seed(0)
        outputs = checkpoint(made, x)
        assert torch.autograd.grad(outputs.sum(), x)[0].equal(expected)


def test_a_number_outside_that_changes_is_an_error():
    scale, x = torch.ones(()), leaf(3)
    outputs = checkpoint(lambda x: x * scale, x)
    scale.add_(1)
    with pytest.raises(RecomputationError, match="inplace operation"):
        outputs.sum().backward()


class Counting(nn.Module):
    """A block with a guarded counter, and a buffer that it moves and reads."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        if not is_recomputing():
            self.calls += 1
        self.steps += 1
        return self.linear(x + self.steps).sin()


@few(1)
@pytest.mark.parametrize("compiles", ["module.compile()", "its forward"])
def test_compiled_block_that_asks_whether_it_is_recomputed_finds_its_buffers(compiles):
    torch.manual_seed(0)
    regions = copy.deepcopy(block := Counting())
    call = regions
    if compiles == "its forward":
        compiled = torch.compile(regions.forward, backend="aot_eager")
        call = lambda x: checkpoint(compiled, x)  # noqa: E731
    else:
        checkpoint_module(regions)
        regions.compile(backend="aot_eager")
    for _ in range(3):
        x, y = leaf(3, 4), leaf(3, 4)
        y.data.copy_(x.data)
        block(x).sum().backward()
        call(y).sum().backward()
        assert torch.equal(y.grad, x.grad)
    assert torch.equal(regions.linear.weight.grad, block.linear.weight.grad)
    assert (regions.calls, regions.steps.item()) == (block.calls, block.steps.item()) == (3, 3)
