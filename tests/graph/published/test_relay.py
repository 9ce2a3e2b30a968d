"""TVM Relay's annotation.checkpoint: an identity whose expression is computed again in the gradient, recursively."""
from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.graph.executed import backward, counted, repeats
from tests.helpers import assert_equal
from tests.slow import few, slow_but
from torchckpt.graph import region
from torchckpt.graph.derive.gradient import gradient


@pytest.fixture
def tensors():
    return [torch.randn(4) for _ in range(4)]


def gradients(function, inputs):
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    return torch.autograd.grad(function(*leaves), leaves)


def test_is_the_identity_in_value_and_type(tensors):
    x, y = tensors[:2]
    nested = region(lambda: (x + y, [x * y, {"z": x, "n": 3}]))()
    assert_equal(nested, (x + y, [x * y, {"z": x, "n": 3}]))


def test_is_the_identity_in_value_and_type_in_a_traced_call(tensors):
    x, y = tensors[:2]
    outputs, _ = gradient(lambda x, y: region(lambda: ((x + y).sum(), [x * y, {"z": x, "n": 3}]))(), x, y)(x, y)
    assert_equal(outputs, ((x + y).sum(), [x * y, {"z": x, "n": 3}]))


def test_of_a_product_of_sums_both_sums_are_recomputed_and_the_product_is_not(tensors):
    def function(x, y, z, w):
        return region(lambda: (x + y) * (z + w))().sum()

    adjoint = gradient(function, *tensors)
    assert backward(adjoint) == ["ones_like", ">add", "mul", ">add_1", "mul"]
    assert_equal(adjoint(*tensors)[1], gradients(function, tensors))


def test_of_a_tuple_of_sums_nothing_is_recomputed(tensors):
    def function(x, y, z, w):
        first, second = region(lambda: (x + y, z + w))()
        return first.sum() + second.sum()

    adjoint = gradient(function, *tensors)
    assert repeats(adjoint) == []
    assert_equal(adjoint(*tensors)[1], gradients(function, tensors))


def test_of_a_tuple_that_is_used_inside_and_outside_both_paths_are_added_up(tensors):
    def function(x, y):
        pair = (x * y, x.sin())
        return (region(lambda pair: (pair[0] * pair[1], pair[1]))(pair)[0] - pair[1]).sum()

    adjoint = gradient(function, *tensors[:2])
    assert_equal(adjoint(*tensors[:2])[1], gradients(function, tensors[:2]))


def test_of_a_tuple_its_first_element_minus_its_second_outside(tensors):
    def function(x, y):
        pair = (x, y)
        return (region(lambda: pair)()[0] - pair[1]).sum()

    assert_equal(gradient(function, *tensors[:2])(*tensors[:2])[1], (torch.ones(4), -torch.ones(4)))


def test_outputs_may_be_nested_tuples(tensors):
    def function(x, y, z, w):
        (a, (b, c)), d = region(lambda: ((x * y, (y * z, z * w)), w.sin()))()
        return (a * b + c * d).sum()

    adjoint = gradient(function, *tensors)
    assert repeats(adjoint) == ["mul_2", "sin", "mul", "mul_1"]
    assert_equal(adjoint(*tensors)[1], gradients(function, tensors))


def test_free_variables_of_the_expression_get_their_gradients_outside(tensors):
    def function(x, y):
        z = x * y
        return (region(lambda v: (v * z).sin())(x) * y).sum()

    adjoint = gradient(function, *tensors[:2])
    assert_equal(adjoint(*tensors[:2])[1], gradients(function, tensors[:2]))


@few(1)
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_what_is_d_regions_deep_runs_d_plus_1_times(depth, tensors):
    def nested(x, left):
        with region(f"{left} left"):
            return nested(x, left - 1).tanh() if left > 1 else x.sin().tanh()

    adjoint = gradient(lambda x: nested(x, depth).sum(), tensors[0])
    assert counted(adjoint)["sin"] == depth + 1
    assert_equal(adjoint(tensors[0])[1], gradients(lambda x: nested(x, depth).sum(), tensors[:1]))


def nest(x, depth, width):
    """Regions one in the other, each of ``width`` operations before and after the one inside."""
    with region(f"{depth} left"):
        for _ in range(width):
            x = x.sin()
        x = nest(x, depth - 1, width) if depth > 1 else x.sigmoid()
        for _ in range(width):
            x = x.sin()
    return x


@few(1)
@pytest.mark.parametrize(
    ("depth", "width"), slow_but([(1, 1), (2, 3), (3, 2), (4, 1), (4, 2)], product([1, 2, 3, 4], [1, 2, 3]))
)
def test_nothing_that_is_d_regions_deep_runs_more_than_d_plus_1_times(depth, width, tensors):
    """With several operations to a region, of which each reads what leaves the one inside."""
    adjoint = gradient(lambda x: nest(x, depth, width).sum(), tensors[0])
    assert counted(adjoint)["sigmoid"] <= depth + 1
    assert counted(adjoint)["sin"] <= sum(2 * width * (level + 1) for level in range(1, depth + 1))
    assert_equal(adjoint(tensors[0])[1], gradients(lambda x: nest(x, depth, width).sum(), tensors[:1]))


@few(1)
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_what_leaves_all_regions_is_there_for_them_too(depth, tensors):
    """Read outside, by a square's gradient, before the gradient of the outermost region is."""
    def nested(x, left):
        return region(lambda x: nested(x, left - 1))(x).sin() if left else x.tanh().sin()

    adjoint = gradient(lambda x: nested(x, depth).square().sum(), tensors[0])
    assert counted(adjoint)["tanh"] <= depth + 1
    assert_equal(adjoint(tensors[0])[1], gradients(lambda x: nested(x, depth).square().sum(), tensors[:1]))


def test_of_nested_regions_the_outer_is_recomputed_with_its_inner_and_the_inner_again_for_its_own_gradient(tensors):
    def function(x):
        with region("outer"):
            with region("inner"):
                h = x.sin().tanh()
            return h.tanh().sum()

    assert backward(gradient(function, tensors[0])) == [
        "ones_like", ">sin", ">tanh", ">tanh_1", "tanh_backward", ">sin", ">tanh", "tanh_backward", "cos", "mul",
    ]


def test_regions_side_by_side_are_recomputed_once_each(tensors):
    def function(x):
        with region("a"):
            x = x.sin().sin()
        with region("b"):
            x = x.sin().sin()
        return x.sum()

    assert repeats(gradient(function, tensors[0])) == ["sin_2", "sin"]
