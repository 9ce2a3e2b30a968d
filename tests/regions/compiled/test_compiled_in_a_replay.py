"""What Dynamo compiles, for the first time or again, while a replay runs: right, or an error."""
from __future__ import annotations

import copy
import threading
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook as any_global_hook

from tests.helpers import leaf
from tests.slow import few, slow_but
from torchckpt import Checkpointing, Pipe, checkpoint, checkpoint_module, is_recomputing
from torchckpt.errors import RecomputationError

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # of Dynamo's own, where an input of a graph is no leaf
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf"),
]


class Counted(nn.Module):
    """Layers alike, whose weights could be taken for each other; and the guard of the documentation."""

    def __init__(self, norm=True):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm, self.dropout = nn.BatchNorm1d(4) if norm else nn.Identity(), nn.Dropout(0.5)
        self.register_buffer("scale", torch.linspace(1, 2, 4))
        self.calls = 0

    def forward(self, x, y=None):
        if not is_recomputing():
            self.calls += 1
        for layer in self.layers:
            x = layer(x).tanh() * self.scale
        return self.dropout(self.norm(x)) + (0 if y is None else y.sin())


class Unguarded(Counted):
    def forward(self, x, y=None):
        for layer in self.layers:
            x = layer(x).tanh() * self.scale
        return self.dropout(self.norm(x)) + (0 if y is None else y.sin())


def values(function, block, *inputs, between=None):
    """Two steps: outputs, gradients, buffers."""
    torch.manual_seed(1)
    seen = []
    for _ in range(2):
        output = function(*inputs)
        if between is not None:
            between()
        seen += [output.detach(), *torch.autograd.grad(output.square().sum(), [*inputs, *block.parameters()])]
    return seen + [buffer.clone() for buffer in block.buffers()]


def of_module(block, backend):
    return torch.compile(block, backend=backend)


def in_place(block, backend):
    block.compile(backend=backend)
    return block


def of_function(block, backend):
    return torch.compile(lambda *inputs: block(*inputs), backend=backend)


def by_call(function, *inputs):
    return checkpoint(function, *inputs)


def prefetched(function, *inputs):
    region = Checkpointing(function, *inputs)
    outputs = region.recompute(region.checkpoint())
    region.prefetch()
    return outputs


def nested(function, *inputs):
    return checkpoint(lambda *inputs: checkpoint(function, *inputs), *inputs)


CALLS = [by_call, prefetched, nested]


BACKENDS = [("eager", 1), ("aot_eager", 2), ("eager", 2), ("aot_eager", 1)]
COMPILED = [of_module, in_place, of_function]
QUICK = [  # each way to compile with each backend, and with two ways to call
    (*BACKENDS[0], of_module, by_call), (*BACKENDS[0], in_place, prefetched), (*BACKENDS[0], of_function, nested),
    (*BACKENDS[1], of_module, nested), (*BACKENDS[1], in_place, by_call), (*BACKENDS[1], of_function, prefetched),
]  # fmt: skip
EVERY = [(*backend, *ways) for backend, *ways in product(BACKENDS, COMPILED, CALLS)]


@few(1)
@pytest.mark.parametrize(("backend", "inputs", "compiled", "call"), slow_but(QUICK, EVERY))
def test_the_documented_guard_in_a_compiled_block(backend, inputs, compiled, call):
    block, given = Counted(), [leaf(4, 4) for _ in range(inputs)]
    twin = copy.deepcopy(block)
    function = compiled(block, backend)
    received = values(lambda *xs: call(function, *xs), block, *given)
    assert all(map(torch.equal, received, values(twin, twin, *given)))
    assert block.calls == twin.calls == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_documented_guard_with_inductor():
    block, x = Counted(), leaf(4, 4)
    twin = copy.deepcopy(block)
    function, plain = (torch.compile(one, backend="inductor") for one in (block, twin))
    assert all(map(torch.equal, values(lambda x: checkpoint(function, x), block, x), values(plain, twin, x)))


@few(1)
@pytest.mark.parametrize("compiled", [of_module, in_place, of_function])
def test_dynamo_is_reset_between_forward_and_backward(compiled):
    block, x = Unguarded(), leaf(4, 4)
    twin = copy.deepcopy(block)
    function = compiled(block, "aot_eager")
    received = values(lambda x: checkpoint(function, x), block, x, between=torch._dynamo.reset)
    assert all(map(torch.equal, received, values(twin, twin, x)))


def test_a_reset_long_after_the_first_step_is_an_error():
    """Nothing has noted what the graphs of those forwards have saved."""
    block, x = Unguarded(), leaf(4, 4)
    function = torch.compile(block, backend="aot_eager")
    for _ in range(3):
        checkpoint(function, x).sum().backward()
    loss = checkpoint(function, x).sum()
    torch._dynamo.reset()
    with pytest.raises(RecomputationError, match="compiled code that its forward found compiled") as caught:
        loss.backward()
    assert "received: a compilation inside of a replay" in str(caught.value)
    checkpoint(function, x).sum().backward()


def test_a_reset_where_values_are_compared_is_right():
    block, x = Unguarded(norm=False), leaf(4, 4)
    function = torch.compile(block, backend="aot_eager")
    for _ in range(3):
        checkpoint(function, x, determinism_check="values").sum().backward()
    seen = values(lambda x: checkpoint(function, x, determinism_check="values"), block, x, between=torch._dynamo.reset)
    assert all(map(torch.equal, seen, values(block, block, x)))


def test_a_graph_that_saves_in_another_order_is_an_error():
    """Torch 2.11 saves in the same order none the less."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)

    @torch.compile(backend="aot_eager")
    def function(x):
        if is_recomputing():
            right = second(x).exp()
            left = first(x).exp()
        else:
            left = first(x).exp()
            right = second(x).exp()
        return left * right

    x = leaf(4, 4)
    expected = torch.autograd.grad((first(x).exp() * second(x).exp()).sum(), [x, first.weight])
    said, received = "", ()
    try:
        received = torch.autograd.grad(checkpoint(function, x).sum(), [x, first.weight])
    except RecomputationError as error:
        said = str(error)
    assert "with other values" in said if said else all(map(torch.equal, received, expected))


def test_a_replay_in_which_something_is_compiled_is_compared_by_value():
    """What it saves has the shapes of the forward, in another order."""

    def function(x):
        compiled(x.detach() if is_recomputing() else x.detach().double())
        first, second = ((x * factor).exp() for factor in ((3.0, 2.0) if is_recomputing() else (2.0, 3.0)))
        return first - second

    compiled = torch.compile(lambda y: y + 1, backend="eager", dynamic=False)
    with pytest.raises(RecomputationError, match="with other values"):
        checkpoint(function, leaf(4, 4)).sum().backward()


@pytest.mark.slow
def test_sizes_that_are_compiled_one_after_the_other():
    block = Counted()
    twin, xs = copy.deepcopy(block), [leaf(size, 4) for size in (4, 6, 9)]
    function = torch.compile(block, backend="aot_eager")

    def step(call, block):
        torch.manual_seed(1)
        losses = [call(x).square().sum() for x in xs]
        return torch.autograd.grad(sum(losses), [*xs, *block.parameters()]), block.norm.num_batches_tracked

    for _ in range(2):
        (received, count), (expected, twins) = step(lambda x: checkpoint(function, x), block), step(twin, twin)
        assert all(map(torch.equal, received, expected))
        assert torch.equal(count, twins)


def test_blocks_alike_are_compiled_by_the_first_of_them():
    blocks, x = nn.Sequential(*(Counted() for _ in range(4))), leaf(4, 4)
    twins = copy.deepcopy(blocks)
    for block in blocks:
        checkpoint_module(block)
        block.compile(backend="aot_eager")
    assert all(map(torch.equal, values(blocks, blocks, x), values(twins, twins, x)))
    assert [block.calls for block in blocks] == [block.calls for block in twins]


class Listed(nn.Module):
    """Dynamo gives up the whole loop, in all objects of the class, if there is a break in it: each layer is a graph."""

    def __init__(self, breaks):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.breaks = breaks

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
            if self.breaks:
                torch._dynamo.graph_break()
        return x


def test_the_error_of_a_replay_that_runs_another_graph_says_so_and_the_step_again_is_right():
    blocks, x = nn.Sequential(Listed(breaks=False), Listed(breaks=True)), leaf(4, 4)
    compiled = [torch.compile(block, backend="aot_eager") for block in blocks]

    def step(x):
        for block in compiled:
            x = checkpoint(block, x)
        return x

    with pytest.raises(RecomputationError, match=r"\(1\) Dynamo ran another graph[^\n]*\n.*\(1\) the step again, from"):
        step(x).sum().backward()
    assert all(map(torch.equal, values(step, blocks, x), values(blocks, blocks, x)))


def test_a_replay_in_another_thread():
    block, x = Counted(), leaf(4, 4)
    twin = copy.deepcopy(block)
    function = torch.compile(block, backend="aot_eager")

    def in_a_thread(x):
        region = Checkpointing(function, x)
        outputs = region.checkpoint()
        thread = threading.Thread(target=region.prefetch)
        thread.start()
        thread.join()
        return outputs

    assert all(map(torch.equal, values(in_a_thread, block, x), values(twin, twin, x)))


@pytest.mark.slow
def test_layers_of_a_pipe():
    layers, x = nn.Sequential(Counted(norm=False), Counted(norm=False)), torch.randn(8, 4)

    def gradients(layers):
        torch.manual_seed(1)
        Pipe(layers, [1, 1], chunks=2, checkpoint="always")(x).square().sum().backward()
        return [parameter.grad for parameter in layers.parameters()]

    compiled = copy.deepcopy(layers)
    for layer in compiled:
        layer.compile(backend="aot_eager")
    assert all(map(torch.equal, gradients(compiled), gradients(layers)))


@pytest.mark.parametrize("call", CALLS)
def test_no_global_hook_is_alive_while_a_region_runs(call):
    norm, hooks = nn.BatchNorm1d(4), []

    def function(x):
        hooks.append(any_global_hook())
        return norm(x).sin()

    call(function, leaf(4, 4)).sum().backward()
    assert len(hooks) > 1
    assert not any(hooks)


@few(1)
@pytest.mark.parametrize("stances", [("default", "force_eager"), ("force_eager", "default")], ids="-".join)
def test_a_replay_has_the_stance_of_its_forward(stances):
    weights = [leaf(4, 4) for _ in range(3)]

    def function(x):  # compiled, it saves other tensors of the same shapes
        a, b = (x @ weights[0]).sin(), (x @ weights[1]).exp()
        return ((a * b).cos() @ weights[2]) * a * x.tanh()

    compiled = torch.compile(function, backend="aot_eager", dynamic=False)
    for _ in range(4):
        checkpoint(compiled, leaf(4, 4)).sum().backward()
    x = leaf(4, 4)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    with torch.compiler.set_stance(stances[0]):
        output = checkpoint(compiled, x)
    with torch.compiler.set_stance(stances[1]):
        (found,) = torch.autograd.grad(output.sum(), x)
    torch.testing.assert_close(found, expected)  # Dynamo does not promise eager's bits
