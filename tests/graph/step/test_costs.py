"""Seconds and FLOPs of operations, counted by hand."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.graph.traced import joint_of
from tests.helpers import leaf
from tests.slow import few
from torchckpt.graph.step.costs import Cost, Measure, cost_of, flops_of, roofline, with_seconds


def node_of(name, function, *inputs):
    return next(node for node in joint_of(function, *inputs).module.graph.nodes if node.name == name)


@pytest.fixture(scope="module")
def product():
    """(2, 3) by (3, 4): 24 + 48 bytes in, 32 out; 2 * 2 * 3 * 4 FLOPs."""
    return node_of("mm", lambda x, w: (x @ w).sum(), torch.randn(2, 3), leaf(3, 4))


@pytest.fixture(scope="module")
def pointwise():
    """40 bytes in, 40 out."""
    return node_of("sin", lambda x: x.sin().sum(), leaf(10))


@few(1)
@pytest.mark.parametrize(
    ("name", "function", "inputs", "flops"),
    [
        ("mm", lambda x, w: (x @ w).sum(), [(2, 3), (3, 4)], 2 * 2 * 3 * 4),
        ("addmm", lambda x, w, b: nn.functional.linear(x, w, b).sum(), [(2, 3), (4, 3), (4,)], 2 * 2 * 3 * 4),
        ("bmm", lambda x, w: torch.bmm(x, w).sum(), [(5, 2, 3), (5, 3, 4)], 5 * 2 * 2 * 3 * 4),
        ("convolution", lambda x, w: torch.conv2d(x, w).sum(), [(1, 2, 6, 6), (3, 2, 3, 3)], 2 * 16 * 3 * 2 * 9),
        ("sin", lambda x: x.sin().sum(), [(10,)], 0),
        ("sum_1", lambda x: x.sin().sum(), [(10,)], 0),
    ],
)
def test_flops_are_those_of_products_and_convolutions(name, function, inputs, flops):
    assert flops_of(node_of(name, function, *(leaf(*shape) for shape in inputs))) == flops


def test_attention_has_those_of_its_two_products():
    def attend(q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v).sum()

    joint = joint_of(attend, *(leaf(1, 2, 6, 8) for _ in range(3)))
    forward = joint.flow.operations[: joint.flow.forward]
    assert sum(operation.flops for operation in forward) == 2 * (2 * 2 * 6 * 6 * 8)


def test_roofline_is_the_larger_of_bytes_and_flops(product, pointwise):
    """A byte takes a nanosecond, in which a processor does ten FLOPs."""
    assert roofline(pointwise) == Cost(80e-9, 0)
    assert roofline(product) == Cost(max(24 + 48 + 32, 48 / 10) * 1e-9, 48)
    large = node_of("mm", lambda x, w: (x @ w).sum(), torch.randn(100, 1000), leaf(1000, 100))
    assert roofline(large) == Cost(2 * 100 * 1000 * 100 / 10 * 1e-9, 2 * 100 * 1000 * 100)


@pytest.mark.parametrize("name", ["aten.mm", "aten.mm.default", "mm"])
def test_given_by_the_name_of_the_operator_or_the_node(product, name):
    assert with_seconds(product, {name: 7}) == Cost(7.0, 48)


def test_given_for_others_is_counted(product, pointwise):
    assert with_seconds(pointwise, {"aten.mm": 7}) == roofline(pointwise)
    assert with_seconds(product, {}) == roofline(product)


def test_node_comes_before_the_operator(product):
    assert with_seconds(product, {"aten.mm": 7, "mm": 8})[0] == 8.0


def test_profiled_is_measured(product):
    cost = cost_of(product, Measure(rounds=2), "profile")
    assert 0 < cost.seconds < 1
    assert cost[1:5] == (48, 0, (2 * 4 * 4,), False)


def test_measured_adds_what_no_shape_tells(pointwise):
    assert cost_of(pointwise, Measure())[:5] == (80e-9, 0, 0, (40,), False)
    assert cost_of(pointwise, Measure(), {"aten.sin": 1.0})[:5] == (1.0, 0, 0, (40,), False)
