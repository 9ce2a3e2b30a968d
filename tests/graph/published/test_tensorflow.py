"""TensorFlow's memory-saving gradients: its figures on tanh chains of 1 MB tensors, its policies, its errors.

A chain of ``n`` values has its input among them. The upstream figures count it; the ones here are above the inputs.
"""
from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from tests.graph.allocations import measured_peak
from tests.graph.executed import repeats, saved
from tests.helpers import assert_equal
from tests.slow import few
from torchckpt.errors import ArgumentError
from torchckpt.graph import mark
from torchckpt.graph.derive.gradient import gradient, gradients
from torchckpt.graph.inspect import simulate

MEGABYTE = 1_000_000


def chain(x, nodes, residual=False, letter="a", last=True):
    """Each value is marked by its place, ``a1`` and so on, the last one too if ``last``."""
    for place in range(1, nodes):
        x = torch.tanh(x) + x if residual else torch.tanh(x)
        if last or place < nodes - 1:
            x = mark(x, f"{letter}{place}")
    return x


def megabytes(count):
    return torch.linspace(-1, 1, count * MEGABYTE // 4)


def scalar(x, nodes, residual=False):
    return chain(x, nodes, residual).sum()


# its figures ----------------------------------------------------------------------------------------------------------


def test_chain_of_5_keeps_a1_and_a3_and_recomputes_a2():
    adjoint = gradient(partial(scalar, nodes=5), megabytes(1), checkpoints=["a1", "a3"])
    assert saved(adjoint) >= {"tanh", "tanh_2"}  # a4 is alive when the backward starts
    assert repeats(adjoint) == ["tanh_1"]


@pytest.mark.slow
@pytest.mark.parametrize(("residual", "eager", "memory"), [(True, 101, 16), (False, 100, 15)])
def test_chain_of_100_needs_less_than_20_megabytes_in_place_of_102(residual, eager, memory):
    """Upstream: 102 -> 20 with the input, 101 -> 20 where the chain is residual."""
    x, function = megabytes(1), partial(scalar, nodes=100, residual=residual)
    for checkpoints, expected in ((None, eager), ("memory", memory)):
        adjoint = gradient(function, x, checkpoints=checkpoints)
        peak = simulate(adjoint).peak_bytes
        assert round(peak / MEGABYTE) == expected
        assert measured_peak(partial(adjoint, x)) == peak


def test_chain_of_100_recomputes_each_value_at_most_once():
    again = repeats(gradient(partial(scalar, nodes=100), megabytes(1), checkpoints="memory"))
    assert len(again) == len(set(again)) < 99


@pytest.mark.slow
def test_gradients_needs_as_little():
    x = megabytes(1)
    chained = partial(chain, nodes=100)
    eager = 101 * MEGABYTE  # with the ones that the backward starts from
    assert measured_peak(lambda: gradients(chained, x, checkpoints=None)) == eager
    assert measured_peak(lambda: gradients(chained, x, checkpoints="memory")) == 15 * MEGABYTE


def test_two_chains_are_independent():
    def function(a, b):
        return (chain(a, 5) + chain(b, 5, letter="b")).sum()

    inputs = megabytes(1), megabytes(1)
    adjoint = gradient(function, *inputs, checkpoints=["a2", "b2"])
    #                         b3        b1        a3        a4        a1; b4 is alive when the backward starts
    assert repeats(adjoint) == ["tanh_6", "tanh_4", "tanh_2", "tanh_3", "tanh"]
    assert simulate(adjoint).peak_bytes // MEGABYTE == 5
    assert simulate(gradient(function, *inputs)).peak_bytes // MEGABYTE == 9


# its call -------------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return mark(self.second(mark(self.first(x).tanh(), "hidden")).tanh(), "last").sum()


@pytest.fixture
def x():
    return torch.randn(3, 4)


@few(2)
@pytest.mark.parametrize(
    "checkpoints",
    ["collection", "speed", "memory", ["hidden"], ["hid"], ["h*n"], ["first", "second"], ["sec"], None,
     lambda value: value.operator == "aten.tanh"],
)
def test_gradients_are_those_of_autograd_whatever_is_kept(checkpoints, x):
    layers, leaf = Layers(), x.clone().requires_grad_()
    expected, = torch.autograd.grad(layers(leaf), leaf)
    assert torch.equal(gradients(layers, x, checkpoints=checkpoints), expected)


def test_lists_in_list_out_and_single_in_single_out(x):
    function = partial(torch.sub, alpha=2)
    assert_equal(gradients(function, [x, x]), [torch.ones(3, 4), torch.full((3, 4), -2.0)])
    assert_equal(gradients(function, (x, x)), (torch.ones(3, 4), torch.full((3, 4), -2.0)))
    assert_equal(gradients(torch.sin, x), x.cos())


def test_grad_ys_are_gradients_of_the_outputs_and_ones_by_default(x):
    def function(x):
        return x.sin(), [x * 2, "a constant"]

    assert_equal(gradients(function, x), x.cos() + 2)
    assert_equal(gradients(function, x, [x, None]), x * x.cos() + 2)
    assert_equal(gradients(torch.sin, x, x), x * x.cos())


def test_unconnected_input_has_none(x):
    assert_equal(gradients(lambda x, y, n: x.sum(), [x, x, torch.arange(3)]), [torch.ones(3, 4), None, None])


def test_sparse_gradient_stays_sparse_until_a_dense_one_is_added():
    weight, index = torch.randn(10, 3), torch.tensor([1, 2, 1])

    def looked_up(weight):
        return nn.functional.embedding(index, weight, sparse=True).tanh().sum()

    leaf = weight.clone().requires_grad_()
    expected, = torch.autograd.grad(looked_up(leaf), leaf)
    once, two = gradients(looked_up, weight), gradients(lambda weight: looked_up(weight) + looked_up(weight), weight)
    assert (once.is_sparse, two.is_sparse) == (True, True)
    assert torch.equal(once.to_dense(), expected.to_dense())
    assert torch.equal(two.to_dense(), (expected + expected).to_dense())
    assert not gradients(lambda weight: looked_up(weight) + weight.sum(), weight).is_sparse


def test_speed_keeps_what_products_make(x):
    adjoint = gradient(Layers(), x, checkpoints="speed")
    assert not any(name.startswith("addmm") for name in repeats(adjoint))


def test_collection_keeps_what_is_marked(x):
    adjoint = gradient(lambda x: mark(x.sin().sin(), "h").sin().sin().sum(), x, checkpoints="collection")
    assert "sin_1" in saved(adjoint)
    assert "sin_1" not in repeats(adjoint)


def test_memory_works_where_there_is_no_separating_value(x):
    def function(x):
        first = x.sin()
        second = first.cos() * x
        return ((second.sin() * first).cos() * second * first).sum()

    leaf = x.clone().requires_grad_()
    assert_equal(gradients(function, x), *torch.autograd.grad(function(leaf), leaf))


def test_inputs_and_outputs_are_dropped_from_the_set(x):
    assert_equal(gradients(lambda x: mark(x.sin(), "h").sin(), x, checkpoints=[x, "h"]), x.cos() * x.sin().cos())


# its errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoints", "message"),
    [
        ("memry", 'checkpoints is not one of "collection", "speed", "memory".*\'memry\'.*checkpoints="memory"'),
        (["a9"], "a name in checkpoints .* received: 'a9'.*checkpoints=\\['a"),
        ([], "selects no value"),
        (lambda value: False, "selects no value"),
        ("speed", "selects no value.*no convolution and no product.*checkpoints=\"memory\""),
        ([torch.ones(2)], "checkpoints has tensors of another call.*mark"),
        (7, "checkpoints is not a policy, a list of names, or a function"),
    ],
    ids=["unknown policy", "unknown name", "empty", "a function that wants none", "nothing", "a tensor", "a number"],
)
def test_error_says_what_to_do(checkpoints, message, x):
    with pytest.raises(ArgumentError, match=f"(?s){message}"):
        gradients(partial(chain, nodes=5), x, checkpoints=checkpoints)


def test_error_of_a_set_of_inputs_alone(x):
    with pytest.raises(ArgumentError, match="selects no value"):
        gradients(partial(chain, nodes=5), x, checkpoints=[x])


def test_error_of_a_collection_that_nothing_is_in(x):
    with pytest.raises(ArgumentError, match=r"(?s)no value is marked.*graph\.mark"):
        gradients(lambda x: x.sin().sin(), x, checkpoints="collection")
