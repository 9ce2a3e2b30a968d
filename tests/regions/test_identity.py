"""One tensor stays one tensor: what a function can tell of its arguments, a replay of it can tell too."""
from __future__ import annotations

import functools
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from tests.helpers import Block, assert_program_transparent, assert_transparent, leaf, same_or_not
from tests.settings import without_collector
from torchckpt import checkpoint, checkpoint_module
from torchckpt.testing import count_recomputes


def square(x):
    """So that what saves something comes after it, and a replay runs it."""
    return x.exp().sin()


def test_one_tensor_given_twice(device, call):
    x = leaf(4, device=device)
    assert_transparent(call, same_or_not, x, x)


def test_one_tensor_that_no_leaf_is_and_nobody_else_holds(call):
    def program(call, x):
        h = x * 1
        return call(same_or_not, h, h)

    assert_program_transparent(call, program, leaf(4))


@pytest.mark.parametrize(
    "shape",
    [
        lambda x: ((x, [x]), {}),
        lambda x: ((x,), {"other": x}),
        lambda x: (([x, x],), {}),
        lambda x: (([x, {"y": x}],), {}),
        lambda x: ((), {"one": x, "two": (x,)}),
    ],
    ids=["argument and list", "argument and keyword", "twice in a list", "list and dict", "two keywords"],
)
@pytest.mark.parametrize("grown", [False, True], ids=["leaf", "no leaf"])
def test_one_tensor_in_several_places(shape, grown, call):
    def first_two(*args, **kwargs):
        return same_or_not(*torch.utils._pytree.tree_leaves((args, kwargs))[:2])

    def program(call, x):
        args, kwargs = shape(x * 1 if grown else x)
        return call(first_two, *args, **kwargs)

    assert_program_transparent(call, program, leaf(4))


@pytest.mark.parametrize("grown", [False, True], ids=["leaf", "no leaf"])
def test_one_tensor_that_outer_and_inner_regions_take(grown, call):
    def outer(call, x, y):
        return call(same_or_not, x, x) * call(same_or_not, x, y) + same_or_not(y, x)

    def program(call, x):
        x = x * 1 if grown else x
        return call(outer, call, x, x)

    assert_program_transparent(call, program, leaf(4))


class Remembers(nn.Module):
    """Takes another way where it is given the tensor that it has."""

    def __init__(self, x) -> None:
        super().__init__()
        self.x = x

    def forward(self, x):
        return same_or_not(x, self.x)


@pytest.mark.parametrize("grown", [False, True], ids=["leaf", "no leaf"])
def test_argument_that_a_module_has_too(grown, call):
    def program(call, x):
        x = x * 1 if grown else x
        return call(Remembers(x), x)

    assert_program_transparent(call, program, leaf(4))


@pytest.mark.parametrize("grown", [False, True], ids=["leaf", "no leaf"])
def test_argument_that_the_function_closes_over(grown, call):
    def program(call, x):
        x = x * 1 if grown else x
        return call(lambda y: same_or_not(y, x), x)

    assert_program_transparent(call, program, leaf(4))


def test_argument_that_a_partial_holds(call):
    def program(call, x):
        return call(functools.partial(same_or_not, x), x)

    assert_program_transparent(call, program, leaf(4))


def test_parameter_as_an_argument_stays_that_parameter(call):
    weight = nn.Parameter(torch.randn(4))

    def function(x, given):
        return square(x * 2 if given is weight and isinstance(given, nn.Parameter) else x) * given

    x = leaf(4)
    expected = torch.autograd.grad(function(x, weight).sum(), [x, weight])
    received = torch.autograd.grad(call(function, x, weight).sum(), [x, weight])
    assert all(map(torch.equal, received, expected))


@pytest.mark.parametrize("frozen", [False, True])
def test_parameter_that_is_offloaded_and_that_only_the_region_holds(frozen):
    def function(x, weight):
        return square(x * 2 if isinstance(weight, nn.Parameter) else x) * weight

    x, values = leaf(4), torch.randn(4)
    (expected,) = torch.autograd.grad(function(x, nn.Parameter(values, not frozen)).sum(), x)
    with save_on_cpu():
        y = checkpoint(function, x, nn.Parameter(values, not frozen))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


def leaf_or_not(x):
    return square(x * 2 if x.is_leaf else x * 3)


@pytest.mark.parametrize("held", [False, True])
def test_no_leaf_stays_no_leaf(held, call):
    kept = []

    def program(call, x):
        h = x * 1
        if held:
            kept.append(h)
        return call(leaf_or_not, h)

    assert_program_transparent(call, program, leaf(4))


def test_leaf_stays_a_leaf():
    assert_transparent(checkpoint, leaf_or_not, leaf(4))


def test_no_leaf_stays_no_leaf_inside_an_outer_region(call):
    def program(call, x):
        return call(lambda h: call(leaf_or_not, h.exp()), x)

    assert_program_transparent(call, program, leaf(4))


def marked(x):
    return square(x * getattr(x, "factor", 1))


@pytest.mark.parametrize("grown", [False, True], ids=["leaf", "no leaf"])
@pytest.mark.parametrize("held", [False, True])
def test_attributes_that_the_caller_put_on_a_tensor(grown, held, call):
    kept = []

    def program(call, x):
        h = x * 1 if grown else x
        h.factor = 3
        if held:
            kept.append(h)
        return call(marked, h)

    assert_program_transparent(call, program, leaf(4))


def test_attributes_inside_an_outer_region(call):
    def inner(call, x):
        h = x.exp()
        h.factor = 3
        return call(marked, h)

    assert_program_transparent(call, lambda call, x: call(inner, call, x), leaf(4))


def test_attributes_of_an_offloaded_tensor():
    def program(call, x):
        h = x * 1
        h.factor = 3
        with save_on_cpu():
            return call(marked, h)

    assert_program_transparent(checkpoint, program, leaf(4))


def test_attention_of_a_tensor_to_itself(device, call):
    attention = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True).to(device)
    x = leaf(2, 3, 32, device=device)
    assert_transparent(call, attention, x, x, x, modules=[attention])


@pytest.mark.parametrize(
    "make", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("by_module", [False, True])
def test_transformer_layers(make, by_module):
    layer = make(32, 4, dim_feedforward=16, dropout=0.1, batch_first=True)
    memory = [leaf(2, 3, 32)] if make is nn.TransformerDecoderLayer else []

    def program(call, x, *memory):
        return layer(x, *memory) if by_module else call(layer, x, *memory)

    x = leaf(2, 3, 32)
    if not by_module:
        assert_program_transparent(checkpoint, program, x, *memory, modules=[layer])
        return
    torch.manual_seed(1)
    expected = torch.autograd.grad(layer(x, *memory).sum(), [x, *memory, *layer.parameters()])
    with checkpoint_module(layer), count_recomputes() as recomputes:
        torch.manual_seed(1)
        received = torch.autograd.grad(layer(x, *memory).sum(), [x, *memory, *layer.parameters()])
    assert all(map(torch.equal, received, expected))
    assert recomputes.total == 1


def test_a_saved_tensor_that_is_alive_comes_back_as_the_same_object():
    """PyTorch's own test_checkpointing_without_reentrant_saved_object_identity asks for it."""
    seen = []

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(y)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.extend(ctx.saved_tensors)
            return gradient, None

    x, y = leaf(1), torch.ones(1)
    checkpoint(Saves.apply, x, y).backward()
    assert seen[0] is y


def test_argument_whose_data_was_replaced_is_replayed_as_it_was(call):
    x = leaf(4)
    expected = torch.autograd.grad(square(x * 1).sum(), x)[0]
    h = x * 1
    y = call(square, h)
    h.data = torch.zeros(4)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


def test_argument_that_was_detached_in_place_is_replayed_as_it_was():
    x = leaf(4)
    expected = torch.autograd.grad(leaf_or_not(x * 1).sum(), x)[0]
    h = x * 1
    y = checkpoint(leaf_or_not, h)
    h.detach_()
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_input_whose_graph_leads_through_its_region_is_freed(requires_grad, call):
    """What keeps ``h`` itself would be in a circle that the garbage collector does not see."""
    x = leaf(4)
    h = x * 1 if requires_grad else torch.ones(4)
    gone = weakref.ref(h)
    with without_collector():
        y = call(lambda h, x: square(h) * x, h, x)
        h += y
        del y, h
        assert gone() is None


def test_block_keeps_only_its_boundary_when_the_input_is_given_twice(call):
    block = Block()

    def both(a, b):
        return block(a) + block(b)

    x = leaf(3, 4)
    assert_transparent(call, both, x, x, modules=[block])
