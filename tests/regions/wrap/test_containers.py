"""What goes into a region and comes out of it: containers, keywords, and arguments that are no tensors."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.helpers import Block, assert_program_transparent, assert_transparent, leaf
from tests.slow import few
from torchckpt.testing import count_recomputes


@dataclass
class Pair:
    left: Any
    right: Any


pytree.register_dataclass(Pair)


class Point(NamedTuple):
    x: Any
    y: Any


CONTAINERS = {
    "tensor": lambda a, b: a,
    "tuple": lambda a, b: (a, b),
    "empty tuple beside a tensor": lambda a, b: ((), a),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"a": a, "b": b},
    "nested": lambda a, b: {"a": [a, (b, None)], "b": ([], {"c": a})},
    "dataclass": Pair,
    "namedtuple": Point,
    "namedtuple of dataclasses": lambda a, b: Point(Pair(a, 1), [Pair(None, b)]),
}


@few(13)
@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_container_in_and_out(call, device, container):
    block = Block().to(device)
    inputs = container(*leaf(2, 3, 4, device=device).unbind())

    def function(inputs):
        return pytree.tree_map_only(Tensor, block, inputs)

    assert_transparent(call, function, inputs, modules=[block])


def test_keyword_arguments(call, device):
    block, bias = Block().to(device), leaf(4, device=device)

    def function(x, *, bias, others, scale=1.0):
        return block(x + bias) * others["factor"] * scale

    x, factor = leaf(3, 4, device=device), leaf(3, 1, device=device)
    assert_transparent(call, function, x, bias=bias, others={"factor": factor}, scale=3, modules=[block])


def test_none_int_str_and_bool_arguments_and_outputs(call, device):
    block = Block().to(device)

    def function(x, nothing, times, name, flag, rate, *, key):
        assert (nothing, times, name, flag, rate, key) == (None, 2, "name", True, 0.5, "key")
        return None, block(x) * times, 7, "text", flag, {"rate": rate}

    x = leaf(3, 4, device=device)
    received = assert_transparent(call, function, x, None, 2, "name", True, 0.5, key="key", modules=[block])
    assert received.outputs[0] is None
    assert received.outputs[2:] == (7, "text", True, {"rate": 0.5})


def test_no_arguments(call, device):
    block, x = Block().to(device), torch.randn(3, 4, device=device)
    assert_transparent(call, lambda: block(x), modules=[block])


def test_container_that_the_function_empties(call, device):
    def function(inputs):
        return inputs.pop().exp() * inputs.pop().cos()

    a, b = leaf(2, 3, device=device).unbind()
    assert_transparent(call, function, [a, b])


def test_only_parameters_require_grad(call, device):
    block = Block().to(device)
    assert_transparent(call, block, torch.randn(3, 4, device=device), modules=[block])


def test_integer_inputs(call, device):
    embedding, block = nn.Embedding(10, 4, device=device), Block().to(device)
    tokens = torch.tensor([[1, 2, 3], [4, 5, 9]], device=device)
    assert_transparent(call, lambda tokens: block(embedding(tokens)), tokens, modules=[embedding, block])


def test_some_inputs_require_grad(call, device):
    block = Block().to(device)
    x, y = torch.randn(3, 4, device=device), leaf(3, 4, device=device)
    received = assert_transparent(call, lambda x, y: block(x * y), x, y, modules=[block])
    assert received.inputs[0] is None
    assert received.inputs[1] is not None


def test_inputs_that_are_not_leaves(call, device):
    block, x = Block().to(device), leaf(3, 4, device=device)
    assert_program_transparent(call, lambda call, x: call(block, x * 2).exp(), x, modules=[block])


def test_nothing_requires_grad(call, device):
    block = Block().to(device).requires_grad_(False)
    x = torch.randn(3, 4, device=device)
    with count_recomputes() as recomputes:
        output = call(block, x)
    assert not output.requires_grad
    assert recomputes.total == 0


def test_complex_inputs(call, device):
    x = leaf(3, 4, device=device, dtype=torch.complex64)
    assert_transparent(call, lambda x: (x.exp() * x.conj()).abs(), x)


def test_one_tensor_as_two_inputs(call, device):
    x = leaf(3, 4, device=device)
    assert_transparent(call, lambda a, b, c: a.exp() * b.sin() * c.cos(), x, x, c=x)


def test_closure_over_tensors(call, device):
    weights = nn.ParameterList([torch.randn(3, 4, device=device), torch.randn(4, device=device)])
    constant = torch.randn(4, device=device)

    def function(x):
        return nn.functional.dropout((x * weights[0]).exp(), 0.5) * weights[1] + constant

    assert_transparent(call, function, leaf(3, 4, device=device), modules=[weights])


def test_closure_over_a_tensor_with_a_graph(call, device):
    weights = nn.ParameterList([torch.randn(4, device=device)])

    def program(call, x):
        scale = weights[0].exp()
        return call(lambda x: (x * scale).sin().exp(), x)

    x = leaf(3, 4, device=device)
    assert_program_transparent(call, program, x, modules=[weights])
