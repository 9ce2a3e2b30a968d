"""gradients(): its arguments, and what it frees. What it keeps, its policies and its errors are in test_tensorflow."""
from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.graph.allocations import live_bytes
from tests.helpers import assert_equal
from torchckpt.errors import ArgumentError, CaptureError
from torchckpt.graph import mark, region
from torchckpt.graph.derive.gradient import gradients


@pytest.fixture
def x():
    return torch.randn(3, 4)


def autograd(function, inputs, arriving=None):
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    return list(torch.autograd.grad(output, leaves, torch.ones_like(output) if arriving is None else arriving))


def test_inputs_may_require_grad_and_get_none(x):
    x.requires_grad_()
    received = gradients(torch.sin, x)
    assert torch.equal(received, x.cos().detach())
    assert (received.requires_grad, x.grad) == (False, None)


def test_gradients_of_outputs_in_another_layout_are_those_of_autograd():
    image = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    convolution = nn.Conv2d(3, 4, 3).requires_grad_(False)
    assert_equal(gradients(convolution, [image]), autograd(convolution, [image]))


def test_module_with_buffers_writes_them_once(x):
    norm, twin = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    assert_equal(gradients(norm, [x]), autograd(twin, [x]))
    assert_equal(dict(norm.named_buffers()), dict(twin.named_buffers()))


def test_dropout_is_drawn_once(x):
    torch.manual_seed(3)
    received = gradients(lambda x: nn.functional.dropout(x.sin()).sin(), [x], checkpoints=None)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    assert_equal(received, autograd(lambda x: nn.functional.dropout(x.sin()).sin(), [x]))
    assert torch.equal(torch.get_rng_state(), state)


def test_complex_inputs_have_gradients_too(x):
    def function(z):
        return (z * z.conj()).real

    assert_equal(gradients(function, [torch.complex(x, x)]), autograd(function, [torch.complex(x, x)]))


def test_regions_decide_where_nothing_else_does(x):
    def function(x):
        return region(lambda x: mark(x.sin(), "h").cos())(x).exp()

    assert_equal(gradients(function, [x], checkpoints=None), autograd(function, [x]))


def test_nothing_stays_alive(x):
    bytes_ = live_bytes(lambda: gradients(lambda x: x.sin().sin().sin(), x))
    assert bytes_[-1] == 0


def test_function_and_inputs_are_let_go():
    class Owner(nn.Module):
        def forward(self, x):
            return x.sin()

    owner, x = Owner(), torch.randn(3)
    gone = weakref.ref(owner), weakref.ref(x)
    gradients(owner, x)
    del owner, x
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


@pytest.mark.parametrize(
    ("function", "inputs", "arriving", "message"),
    [
        (lambda x: 3, [torch.ones(2)], None, "the function returns no tensor"),
        (torch.sin, [torch.ones(2)], [torch.ones(2), None], "one gradient for each tensor.*2 for 1"),
        (torch.sin, [torch.ones(2)], [torch.ones(3)], r"a gradient has another shape than .*\(3,\) for \(2,\)"),
        (torch.sin, [3.0], None, "an input is not a tensor.*input 0: 3.0"),
        ("sin", [torch.ones(2)], None, "the first argument is neither a function nor a module"),
    ],
)
def test_argument_is_refused(function, inputs, arriving, message):
    with pytest.raises(ArgumentError, match=f"(?s){message}"):
        gradients(function, inputs, arriving)


def test_function_that_changes_its_input_is_refused(x):
    before = x.clone()
    with pytest.raises(CaptureError, match="changes an input in place"):
        gradients(lambda x: x.mul_(2), x)
    assert torch.equal(x, before)
