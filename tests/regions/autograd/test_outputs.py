"""What a region may return, and what of it a loss may use."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import Function

from tests.helpers import Block, assert_program_transparent, assert_transparent, leaf, run, total
from tests.slow import few
from torchckpt import checkpoint

EXTRAS = {
    "integer": lambda h: h.argmax(dim=0),
    "boolean": lambda h: h > 0,
    "float without grad": lambda h: torch.ones_like(h),
    "detached": lambda h: h.detach(),
    "complex": lambda h: torch.complex(h, h.exp()),
    "complex without grad": lambda h: torch.complex(h, h).detach(),
    "double": lambda h: h.double() * 2,
    "scalar": lambda h: h.sum(),
    "none": lambda h: None,
    "number": lambda h: 3,
}


@few(17)
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
def test_output_of_any_kind_in_any_position(call, device, extra, position):
    block = Block().to(device)

    def function(x):
        h = block(x)
        outputs = [h * 3, h.cos()]
        outputs.insert(position, extra(h))
        return tuple(outputs)

    assert_transparent(call, function, leaf(3, 4, device=device), modules=[block])


def test_gradient_beside_an_output_without_one_is_3(call, device):
    x = torch.ones(1, device=device, requires_grad=True)
    _, y = call(lambda x: (x.detach() * 100, x * 3), x)
    y.backward()
    assert x.grad.item() == 3


def three(block):
    def function(x):
        h = block(x)
        return h.exp(), h.sin(), block(h)

    return function


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
def test_loss_of_some_outputs(call, device, used):
    block = Block().to(device)

    def loss(outputs):
        return total([outputs[place] for place in used])

    assert_transparent(call, three(block), leaf(3, 4, device=device), modules=[block], loss=loss)


def test_loss_of_no_output(call, device):
    block = Block().to(device)

    def program(call, x):
        call(block, x)
        return x.exp()

    assert_program_transparent(call, program, leaf(3, 4, device=device), modules=[block])


class Witness(Function):
    """Two identities that write down what gradients come back, undefined ones as undefined."""

    @staticmethod
    def forward(ctx, input, name, events):
        ctx.set_materialize_grads(False)
        ctx.name, ctx.events = name, events
        return input.clone(), input.clone()

    @staticmethod
    def backward(ctx, *grads):
        ctx.events.append((ctx.name, ["undefined" if grad is None else "defined" for grad in grads]))
        return next((grad for grad in grads if grad is not None), None), None, None


def test_no_zeros_go_into_an_unused_branch(call, device):
    events = []

    def function(x):
        used, unused = Witness.apply(x.exp(), "shared", events)
        return Witness.apply(unused, "unused", events)[0].exp(), used.exp()

    run(function, leaf(3, device=device), loss=lambda outputs: outputs[1].sum())
    assert events == [("shared", ["defined", "undefined"])]
    events.clear()
    run(call, function, leaf(3, device=device), loss=lambda outputs: outputs[1].sum())
    assert events == [("shared", ["defined", "undefined"])]


class Triple(Function):
    """A custom function as most are written: undefined gradients come to it as zeros."""

    @staticmethod
    def forward(ctx, input):
        return input * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def test_parameter_of_an_unused_branch_has_no_gradient(call, device):
    weights = nn.ParameterList([torch.randn(3, device=device), torch.randn(3, device=device)])

    def function(x):
        return Triple.apply(x * weights[0]), Triple.apply(x * weights[1])

    received = assert_transparent(call, function, leaf(3, device=device), modules=[weights], loss=lambda y: y[1].sum())
    assert received.parameters[0] is None


def test_output_that_is_an_input(call, device):
    block = Block().to(device)
    assert_transparent(call, lambda x: (x, block(x)), leaf(3, 4, device=device), modules=[block])
    assert_program_transparent(call, lambda call, x: call(lambda h: (block(h), h), x * 2), leaf(3, 4, device=device))


def test_identity(call, device):
    assert_transparent(call, lambda x: x, leaf(3, device=device))
    assert_program_transparent(call, lambda call, x: call(lambda h: h, x.exp()).exp(), leaf(3, device=device))


def test_output_that_is_an_input_is_the_same_object():
    x, y = leaf(3), torch.arange(3)
    outputs = checkpoint(lambda x, y: (x, y, x.exp()), x, y)
    assert outputs[0] is x
    assert outputs[1] is y


def test_output_that_is_a_view_of_an_input(call, device):
    block = Block().to(device)
    assert_transparent(call, lambda x: (x.t(), x[0], block(x)), leaf(3, 4, device=device), modules=[block])
    assert_transparent(call, lambda x: x.view(-1), leaf(3, 4, device=device))


def test_output_that_is_a_view_of_another_output(call, device):
    block = Block().to(device)

    def function(x):
        h = block(x)
        return h, h[0], h.t()

    assert_transparent(call, function, leaf(3, 4, device=device), modules=[block])


def test_one_tensor_as_two_outputs(call, device):
    block = Block().to(device)

    def function(x):
        h = block(x)
        return h, h

    assert_transparent(call, function, leaf(3, 4, device=device), modules=[block])
    first, second = checkpoint(function, leaf(3, 4, device=device))
    assert first is second


def test_output_that_is_a_parameter(call, device):
    block = Block().to(device)
    assert_transparent(call, lambda x: (block.first.weight, block(x)), leaf(3, 4, device=device), modules=[block])


def test_output_changed_in_place_after_the_region(call, device):
    def program(call, x):
        outputs = call(lambda x: torch.nn.functional.dropout(x * x, 0.5), x)
        return outputs.mul_(2).add_(1)

    assert_program_transparent(call, program, leaf(3, device=device))


def test_function_that_makes_no_graph(call, device):
    x = leaf(3, device=device)
    outputs = call(lambda x: (x.detach().exp(), torch.zeros(2, device=device), "text"), x)
    assert not outputs[0].requires_grad
    assert not outputs[1].requires_grad
    assert outputs[2] == "text"
