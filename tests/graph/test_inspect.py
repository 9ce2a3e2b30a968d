"""simulate() is the allocator to the byte; separators() are what removing a node cuts."""
from __future__ import annotations

import random

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graph.allocations import measured_peak
from torchckpt.errors import ArgumentError
from torchckpt.graph import region
from torchckpt.graph.derive.gradient import gradient
from torchckpt.graph.derive.simplify import simplify
from torchckpt.graph.inspect import separators, simulate


@pytest.fixture
def x():
    return torch.randn(64, 64)


def traced(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


def names(nodes):
    return [node.name for node in nodes]


# simulate -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sin().cos().sin(),
        lambda x: (x.sin().t() @ x.sin()).view(-1)[3:7],
        lambda x: nn.functional.layer_norm(x.sin(), (64,)).cos(),
        lambda x: sum(part.sin() for part in x.sin().chunk(4)),
        lambda x: (x.sin(), {"again": [x.sin().cos()]}),
        lambda x: torch.linalg.solve(x, x.sin()),
    ],
    ids=["chain", "views", "several outputs", "parts", "nested", "workspace"],
)
def test_forward_takes_the_bytes_of_the_allocator(function, x):
    module = traced(function, x)
    assert simulate(module).peak_bytes == measured_peak(lambda: module(x))


@pytest.mark.parametrize("change", [lambda module: module, simplify], ids=["as it is", "simplified"])
def test_gradient_takes_the_bytes_of_the_allocator(change, x):
    function = region(lambda x, w: (nn.functional.gelu(x @ w.t()) @ w).sin())
    module = change(gradient(lambda x, w: function(x, w).sin().sum(), x, x))
    assert simulate(module).peak_bytes == measured_peak(lambda: module(x, x))


def test_boundary_is_where_the_forward_ends_and_saved_is_what_crosses_it(x):
    memory = simulate(gradient(lambda x: x.sin().tanh().sum(), x))
    #                           sin  tanh  sum      ones, tanh', sin'
    assert (memory.boundary, len(memory.bytes_during)) == (3, 7)
    assert len(memory.saved) == 2


def test_forward_has_no_boundary_before_its_end(x):
    memory = simulate(traced(lambda x: x.sin().cos(), x))
    assert memory.bytes_during == (x.nbytes, 2 * x.nbytes)
    assert (memory.boundary, memory.saved) == (2, ())


def test_workspaces_may_be_left_out():
    image, weight = torch.randn(2, 8, 16, 16), torch.randn(8, 8, 3, 3)
    module = traced(nn.functional.conv2d, image, weight)
    assert simulate(module, workspaces=False).peak_bytes <= simulate(module).peak_bytes


def test_graph_is_left_as_it_is(x):
    module = gradient(lambda x: x.sin().sum(), x)
    code = module.code
    simulate(module)
    assert module.code == code


def test_graph_without_values_is_refused():
    with pytest.raises(ArgumentError, match=r"(?s)a node has no meta.*make_fx"):
        simulate(fx.symbolic_trace(lambda x: x.sin().cos()))


# separators -----------------------------------------------------------------------------------------------------------


def test_values_of_a_chain_separate_but_the_last(x):
    assert names(separators(traced(lambda x: x.sin().cos().exp(), x))) == ["sin", "cos"]


def test_what_an_edge_jumps_over_does_not_separate(x):
    def function(x):
        a = x.sin()
        return (a + a.cos()).exp().sin()

    assert names(separators(traced(function, x))) == ["sin", "add", "exp"]


def test_inputs_and_parameters_count_for_nothing(x):
    assert names(separators(traced(lambda x, w: ((x @ w).sin() @ w).sin() + x, x, x))) == ["mm", "sin", "mm_1", "sin_1"]


def test_views_count_as_what_they_are_views_of(x):
    assert names(separators(traced(lambda x: x.sin().t().view(-1).cos().exp(), x.t()))) == ["sin", "cos"]


def test_one_of_several_outputs_separates(x):
    def norm(x):
        return nn.functional.layer_norm(x.sin(), (64,)).cos().exp()

    def highest(x):
        values, places = x.sin().max(0)
        return values.cos() * places

    assert names(separators(traced(norm, x))) == ["sin", "getitem", "cos"]
    assert names(separators(traced(highest, x))) == ["sin"]


def test_of_a_gradient_the_forward_is_looked_at(x):
    assert names(separators(gradient(lambda x: x.sin().cos().exp().sum(), x))) == ["sin", "cos", "exp"]


@pytest.mark.parametrize("seed", range(8))
def test_a_node_separates_iff_no_path_goes_around_it(seed):
    """Brute force: with it removed, nothing after it is reached from anything before it."""
    generator = random.Random(seed)

    def function(x):
        values = [x.sin()]
        for _ in range(12):
            left, other = generator.choices(values[-2:], k=2)
            values.append(left + other.cos())
        return values[-1]

    module = traced(function, torch.ones(2))
    module.graph.eliminate_dead_code()
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]

    def is_separator(place):
        after = set(nodes[place + 1 :])
        return not any(user in after for node in nodes[:place] for user in node.users)

    expected = [node for place, node in enumerate(nodes[:-1]) if is_separator(place)]
    assert separators(module) == expected
