"""A traced graph as operations on storages."""
from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from tests.graph.traced import Function
from tests.graph.traced import joint_of as traced
from tests.helpers import assert_equal, leaf
from torchckpt import graph
from torchckpt.graph.step.costs import Cost
from torchckpt.graph.step.joint import copied, joint_of, needed, reached
from torchckpt.planning.remat.flow.dataflow import Operation


def cost(node):
    """One second, no FLOPs, no workspace."""
    return Cost(1.0, 0)


def bare(joint):
    """The joint graph with one second for each operation."""
    return joint_of(joint.module, joint.forward_outputs, cost)


def named(joint):
    """Reads and writes of each operation."""
    return [(operation.name, operation.reads, operation.writes) for operation in joint.flow.operations]


@pytest.fixture
def product(gradients_go):
    return bare(traced(lambda x, w: (x @ w).relu().view(-1).sum(), torch.randn(2, 3), leaf(3, 4)))


# operations and storages ----------------------------------------------------------------------------------------------


def test_dataflow_of_a_product(product):
    """0 and 1 are the inputs, 2 the gradient of the loss."""
    assert named(product) == [
        ("mm", (0, 1), (3,)),
        ("relu", (3,), (4,)),
        ("sum_1", (4,), (5,)),
        ("tangents", (), (2,)),
        ("threshold_backward", (2, 4), (6,)),
        ("mm_1", (0, 6), (7,)),
    ]
    flow = product.flow
    assert flow.sizes_bytes == (24, 48, 4, 32, 32, 4, 32, 48)
    assert (flow.forward, flow.given, flow.results) == (3, {0, 1}, {5, 7})
    assert [operation.seconds for operation in flow.operations] == [1, 1, 1, 0, 1, 1]
    assert [operation.repeatable for operation in flow.operations] == [True, True, True, False, True, True]


def test_views_write_nothing_and_have_the_storage_of_their_base(product):
    storages = {node.name: product.storages[node] for node in product.views}
    assert storages == {"view": {4}, "detach": {4}, "detach_1": {4}, "expand": {2}, "view_1": {2}, "t": {0}}


def test_nodes_are_those_of_the_operations(product):
    assert [node and node.name for node in product.nodes] == [
        "mm", "relu", "sum_1", None, "threshold_backward", "mm_1",
    ]
    assert [node.name for node in product.tangents] == ["tangents_1"]
    outputs = [node and node.name for node in product.outputs]
    assert outputs == ["sum_1", None, "mm_1"]


def test_outputs_of_one_operation_are_written_at_once():
    joint = bare(traced(lambda x: nn.functional.layer_norm(x, (4,)).sum(), leaf(3, 4)))
    norm = joint.flow.operations[0]
    assert norm.name == "native_layer_norm"
    assert [joint.flow.sizes_bytes[storage] for storage in norm.writes] == [48, 12, 12]


@pytest.mark.usefixtures("gradients_go")
def test_output_that_is_an_input_is_given_and_no_result():
    joint = bare(traced(lambda x, y: (y, x.sin()), leaf(3), torch.ones(3)))
    assert [operation.name for operation in joint.flow.operations if operation.writes[0] in joint.flow.results] == [
        "sin", "mul",
    ]


def test_result_that_is_a_view_keeps_its_base():
    flow = bare(traced(lambda x: x.sin()[:2], leaf(4))).flow
    assert flow.results >= {flow.operations[0].writes[0]}


def test_constant_is_given():
    joint = bare(traced(lambda x: x * torch.tensor([1.0, 2.0, 3.0]), leaf(3)))
    (constant,) = joint.module.graph.find_nodes(op="get_attr")
    assert joint.flow.given >= joint.storages[constant]


def test_dead_operations_are_none():
    """Of an output that is not differentiated, no backward; of what nobody reads, nothing."""
    joint = bare(traced(lambda x: (x.exp().sum(), x.cos() * 0)[0], leaf(3)))
    assert [operation.name for operation in joint.flow.operations] == ["exp", "sum_1", "tangents", "mul_1"]


def test_what_a_view_of_a_view_reads_is_the_base():
    joint = bare(traced(lambda x: x.sin().view(2, 2).t()[0].exp().sum(), leaf(4)))
    exp = next(operation for operation in joint.flow.operations if operation.name == "exp")
    assert exp.reads == joint.flow.operations[0].writes


# what runs once -------------------------------------------------------------------------------------------------------


def test_new_values_of_buffers_are_results_of_the_forward():
    flow = bare(traced(nn.BatchNorm1d(3), leaf(4, 3))).flow
    norm = next(operation for operation in flow.operations if "batch_norm" in operation.name)
    assert len(flow.forward_results) == 3  # mean, variance, count
    assert len(flow.forward_results & {*norm.writes}) == 2
    assert not flow.forward_results & flow.results


def test_what_the_backward_makes_of_saved_values_alone_comes_after_the_gradients():
    """They are there when a backward begins, though its first operations do not read them."""
    flow = bare(traced(lambda x: x.sin(), leaf(3))).flow
    arrival, derivative = flow.operations[flow.forward : flow.forward + 2]
    (token,) = set(arrival.writes) & set(derivative.reads)
    assert (derivative.name, flow.sizes_bytes[token]) == ("cos", 0)


def test_draws_stay_in_their_order():
    """Each reads a token of the one before, which takes no bytes."""
    flow = bare(traced(lambda x: (x * torch.rand(3) * torch.rand(3)).sum(), leaf(3))).flow
    first, second = (operation for operation in flow.operations if operation.name.startswith("rand"))
    (token,) = {*first.writes} & {*second.reads}
    assert flow.sizes_bytes[token] == 0
    assert not first.repeatable
    assert not second.repeatable


def test_random_operation_that_no_output_reads_is_run_all_the_same():
    """The generator is to be where it would be in eager."""
    flow = bare(traced(lambda x: (torch.rand(3), x.sin())[1], leaf(3))).flow
    names = [operation.name for operation in flow.operations[: flow.forward]]
    assert "sin" in names
    assert [name for name in names if "rand" in name]


class Noisy(torch.autograd.Function):
    """Adds noise to its gradient, without a look at it."""

    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad + torch.randn(grad.shape)


@pytest.mark.parametrize("rng", ["keep", "replay"])
def test_random_numbers_that_read_no_gradient_are_drawn_in_the_backward(rng):
    function, x = Function(lambda x: Noisy.apply(nn.functional.dropout(x, 0.5)).exp().sum()), leaf(3)
    found = []
    for call in (function, graph.rematerialize(function, x, rng=rng)):
        torch.manual_seed(1)
        loss = call(x)
        between = torch.rand(3)
        found.append([between, *torch.autograd.grad(loss, x), torch.get_rng_state()])
    assert_equal(*found)


def test_dropout_is_repeated_by_its_mask():
    flow = bare(traced(lambda x: nn.functional.dropout(x.sin(), 0.5).exp().sum(), leaf(3))).flow
    dropout = next(operation for operation in flow.operations if operation.name == "native_dropout")
    output, mask, *_ = dropout.writes
    assert dropout.repeatable
    assert dropout.substitute.reads == (dropout.reads[0], mask)
    assert dropout.substitute.writes == (output,)


# sparse ---------------------------------------------------------------------------------------------------------------


def test_sparse_gradient_has_the_storages_of_its_parts():
    table = nn.Embedding(10, 3, sparse=True)
    joint = bare(traced(table, torch.tensor([1, 2])))
    sparse = next(node for node in joint.views if "sparse" in str(node.target))
    assert len(joint.storages[sparse]) == 2


def test_sparse_input_takes_nothing():
    joint = bare(traced(lambda m, x: torch.sparse.mm(m, x), torch.eye(3).to_sparse(), leaf(3, 2)))
    place = next(node for node in joint.storages if node.name == "primals_1")
    assert joint.flow.given >= joint.storages[place]
    assert [joint.flow.sizes_bytes[storage] for storage in joint.storages[place]] == [0]


# graphs ---------------------------------------------------------------------------------------------------------------


def test_traced_graph_is_left_as_it_is(product):
    module = product.module
    before = module.code
    joint_of(module, 1, cost)
    assert module.code == before


def test_copy_shares_no_node():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.sin, (x,)))
    twin = copied(graph)
    assert [str(node) for node in twin.nodes] == [str(node) for node in graph.nodes]
    assert not {*twin.nodes} & {*graph.nodes}


def test_reached_and_needed():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    a, b = graph.call_function(torch.sin, (x,)), graph.call_function(torch.cos, (y,))
    c = graph.call_function(torch.add, (a, b))
    assert reached([x]) == {x, a, c}
    assert needed([a]) == {a, x}
    assert needed([c]) == {x, y, a, b, c}
    assert reached([]) == needed([]) == set()


def test_operations_are_plain(product):
    assert product.flow.operations[0] == Operation("mm", (0, 1), (3,), 1.0)
