"""Nested tensors, of both layouts: among the arguments, and made inside of a region."""
from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from tests.helpers import assert_program_transparent, leaf
from torchckpt import checkpoint
from torchckpt.errors import RecomputationError

pytestmark = pytest.mark.filterwarnings("ignore:.*nested")


def attention(x):
    """Of a jagged tensor, which torch's kernel for the CPU takes apart."""
    parts = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, 5, 9, 12]))
    heads = parts.unflatten(-1, (2, 4)).transpose(1, 2)
    return nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2).values()


def of_lengths(x):
    starts, lengths = torch.tensor([0, 4, 8, 12]), torch.tensor([3, 1, 2])
    parts = torch.nested.nested_tensor_from_jagged(x, starts, lengths)
    return torch.cat((parts.sin() * parts).unbind())


def of_two(layout, x):
    parts = torch.nested.as_nested_tensor([x[:5], x[5:]], layout=layout)
    return torch.nested.to_padded_tensor(parts.sin() * parts, 0.0)


def left_jagged(x):
    return (torch.nested.as_nested_tensor([x[:5], x[5:]], layout=torch.jagged).sin() * 2).cos()


@pytest.mark.parametrize("check", ["default", "values", "none"])
@pytest.mark.parametrize(
    "function", [attention, of_lengths, left_jagged, partial(of_two, torch.strided), partial(of_two, torch.jagged)]
)
def test_nested_tensors_that_a_region_makes(function, check):
    """A replay makes others, whose lengths torch took for others: an error. So were those that have no shape."""

    def program(call, x):
        output = call(lambda x: function(x.tanh()), x)
        return (output.values() if output.is_nested else output).sin()

    call = partial(checkpoint, determinism_check=check)
    assert_program_transparent(call, program, leaf(12, 8))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_that_a_replay_makes_of_other_lengths_are_an_error(layout):
    lengths = [[5, 7], [4, 8]]

    def function(x):
        parts = torch.nested.as_nested_tensor(list(x.split(lengths[0])), layout=layout)
        return torch.nested.to_padded_tensor(parts.sin(), 0.0)

    output = checkpoint(function, leaf(12, 8))
    lengths.reverse()
    with pytest.raises(RecomputationError, match="did not save what its forward saved"):
        output.sum().backward()


@pytest.mark.parametrize("is_leaf", [False, True])
@pytest.mark.parametrize("hooks", [False, True])
def test_a_nested_tensor_as_an_argument(is_leaf, hooks):
    def program(call, x):
        parts = torch.nested.as_nested_tensor([x[:5], x[5:]])
        parts = parts.detach().requires_grad_() if is_leaf else parts
        with torch.autograd.graph.save_on_cpu() if hooks else nullcontext():
            output = call(lambda parts: nn.functional.dropout(layer(parts).relu() * parts, 0.3), parts)
        del parts
        return torch.nested.to_padded_tensor(output, 0.0).sin()

    layer = nn.Linear(8, 8)
    assert_program_transparent(checkpoint, program, leaf(12, 8), modules=[layer])
