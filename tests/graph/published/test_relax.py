"""TVM Relax's Gradient pass with start_checkpoint and end_checkpoint: its table, as regions of PyTorch functions.

A value that ``start`` wraps enters a region, one that ``end`` wraps leaves it. Values are named as nodes of the traced
graph: ``pow_3`` is v3.
"""
from __future__ import annotations

import pytest
import torch

from tests.graph.executed import backward, repeats, saved
from torchckpt.graph import mark, region
from torchckpt.graph.derive.gradient import gradient


@pytest.fixture
def tensors():
    return [torch.randn(3, 3) for _ in range(5)]


def sequential(x):
    with region("first"):
        v1 = x**3
    v2 = v1**3
    with region("second"):
        v3 = v2**3
        return (v3**3).sum()


def adjacent(x):
    """A value leaves one region and enters the next."""
    with region("first"):
        v1 = x**3
        v2 = v1**3
    with region("second"):
        v3 = v2**3
        return (v3**3).sum()


def tree(x, y, z, u, v):
    v1 = x * y
    with region("left"):
        v2 = v1 * z
    with region("right"):
        v3 = u * v
    return (v2 * v3).sum()


def dag(v):
    for _ in range(3):
        with region("doubled"):
            doubled = v * 2 * 2
        v = v * doubled
    return v.sum()


@pytest.mark.parametrize("function", [sequential, adjacent])
def test_sequential_v2_is_saved_and_v3_then_v1_are_recomputed(function, tensors):
    adjoint = gradient(function, tensors[0])
    assert saved(adjoint) == {"pow_2"}
    assert repeats(adjoint) == ["pow_3", "pow_1"]
    #                               d v4                            d v3
    assert backward(adjoint) == ["ones_like", ">pow_3", "pow", "mul", "mul", "pow", "mul", "mul",
                                 ">pow_1", "pow", "mul", "mul", "pow", "mul", "mul"]


def test_tree_v1_is_saved_and_v2_and_v3_are_recomputed(tensors):
    adjoint = gradient(tree, *tensors)
    assert saved(adjoint) == {"mul"}
    assert repeats(adjoint) == ["mul_1", "mul_2"]


def test_tree_only_v3_is_recomputed_for_the_gradient_of_z(tensors):
    adjoint = gradient(tree, *tensors, require_grads=["z"])
    assert saved(adjoint) == {"mul"}
    assert backward(adjoint) == ["ones_like", ">mul_2", "mul", "mul"]


def test_dag_v3_and_v6_are_saved_and_each_pair_is_recomputed_where_the_backward_gets_to_it(tensors):
    adjoint = gradient(dag, tensors[0])
    assert saved(adjoint) == {"mul_2", "mul_5"}
    assert repeats(adjoint) == ["mul_6", "mul_7", "mul_3", "mul_4", "mul", "mul_1"]
    assert backward(adjoint) == [
        "ones_like",
        "mul", ">mul_6", ">mul_7", "mul", "mul", "mul", "add",
        "mul", ">mul_3", ">mul_4", "mul", "mul", "mul", "add",
        "mul", ">mul", ">mul_1", "mul", "mul", "mul", "add",
    ]


def test_tuple_that_enters_a_region_recomputes_nothing(tensors):
    """TVM recomputes four tuple operations; a graph of tensors has none."""

    def function(x, y):
        pair = (x**3, y**3)
        with region("product"):
            a, b = pair
            return (a * b).sum()

    adjoint = gradient(function, *tensors[:2])
    assert saved(adjoint) == {"pow_1", "pow_2"}
    assert repeats(adjoint) == []


def test_each_value_is_recomputed_at_most_once(tensors):
    def function(x):
        with region("all"):
            a = x.sin()
            b = a.sin()
        return (a * b * b.sin()).sum()

    again = repeats(gradient(function, tensors[0]))
    assert sorted(again) == sorted(set(again))


def test_without_a_region_everything_is_saved(tensors):
    adjoint = gradient(lambda x: (x**3 + x.sin() ** 3).sum(), tensors[0])
    assert saved(adjoint) == {"sin"}
    assert repeats(adjoint) == []


@pytest.mark.parametrize("function", [sequential, adjacent, dag])
def test_recomputed_or_not_the_gradient_is_that_of_autograd(function, tensors):
    x = tensors[0].requires_grad_()
    expected, = torch.autograd.grad(function(x), x)
    loss, (received,) = gradient(function, x)(x)
    assert torch.equal(loss, function(x).detach())
    assert torch.equal(received, expected)


# what may be asked for ------------------------------------------------------------------------------------------------


def test_returns_the_original_outputs_and_the_gradients_in_the_order_asked_for(tensors):
    x, y = tensors[:2]
    outputs, gradients = gradient(lambda x, y: ((x * y).sum(), x + y), x, y, require_grads=["y", "x"])(x, y)
    assert torch.equal(outputs[0], (x * y).sum())
    assert torch.equal(outputs[1], x + y)
    assert [torch.equal(*pair) for pair in zip(gradients, (x, y))] == [True, True]


def test_target_is_the_output_at_target_index(tensors):
    x = tensors[0]
    _, (received,) = gradient(lambda x: (x, {"loss": (x * 3).sum()}), x, target_index=1)(x)
    assert torch.equal(received, torch.full((3, 3), 3.0))


@pytest.mark.parametrize("inside", [False, True])
def test_intermediate_value_has_a_gradient_inside_a_region_too(inside, tensors):
    x = tensors[0]

    def function(x):
        with region("first"):
            h = mark(x**3, "h")
            k = h.sin()
            h = h if inside else mark(k, "k")
        return ((h * 2).sin() + k).sum()

    name = "h" if inside else "k"
    leaf = (x**3 if inside else (x**3).sin()).requires_grad_()
    expected, = torch.autograd.grad(((leaf * 2).sin() + (leaf.sin() if inside else leaf)).sum(), leaf)
    _, (received,) = gradient(function, x, require_grads=[name])(x)
    assert torch.equal(received, expected)


def test_unused_input_has_a_gradient_of_zeros(tensors):
    x, y = tensors[:2]
    _, gradients = gradient(lambda x, y: x.sum(), x, y)(x, y)
    assert torch.equal(gradients[1], torch.zeros(3, 3))


def test_intermediate_value_that_the_target_does_not_depend_on_has_a_gradient_of_zeros(tensors):
    def function(x):
        mark(x.sin(), "aside")
        return x.sum()

    _, gradients = gradient(function, tensors[0], require_grads=["aside", 0])(tensors[0])
    assert torch.equal(gradients[0], torch.zeros(3, 3))
    assert torch.equal(gradients[1], torch.ones(3, 3))


def test_original_graph_is_untouched(tensors):
    module = torch.fx.symbolic_trace(lambda x, y: (x * y).sum())
    before = module.code, [dict(node.meta) for node in module.graph.nodes]
    gradient(module, *tensors[:2])
    assert (module.code, [dict(node.meta) for node in module.graph.nodes]) == before
