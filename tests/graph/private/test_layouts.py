"""Layouts: what a trace takes for the layout of a result is that of eager."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import (
    batch_norm,
    binary_cross_entropy,
    dropout,
    elu,
    hardsigmoid,
    hardswish,
    huber_loss,
    layer_norm,
    log_softmax,
    logsigmoid,
    max_pool2d,
    max_unpool2d,
    mse_loss,
    pad,
    relu6,
    smooth_l1_loss,
    softplus,
)

from tests.graph.eager import compare
from tests.graph.traced import Function
from tests.slow import few
from torchckpt import graph
from torchckpt.graph.private.layouts import eager_layouts


class Normed(nn.Module):
    """A norm over the middle of three dimensions, of an input that is transposed, and what reads its layout."""

    def __init__(self, read, norm=None):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.norm, self.read = norm, read

    def forward(self, x):
        x = self.linear(x).transpose(1, 2)
        x = batch_norm(x, None, None, training=True) if self.norm is None else self.norm(x)
        return self.read(x.transpose(1, 2)).square().mean()


READS = {
    "a view": lambda x: x.reshape(8, -1),
    "a product": lambda x: x @ torch.eye(16),
    "random numbers": lambda x: dropout(x.contiguous(), 0.5),
}


@few(1)
@pytest.mark.parametrize("norm", [None, nn.BatchNorm1d(16), nn.BatchNorm1d(16).eval()])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_batch_norm_of_a_transposed_input_is_that_of_eager(read, norm):
    model = Normed(read, copy.deepcopy(norm))
    traced, x = copy.deepcopy(model), torch.randn(8, 12, 16)
    step = graph.rematerialize(traced, x)
    found = []
    for call, of in ((model, model), (step, traced)):
        torch.manual_seed(1)
        loss = call(x)
        loss.backward()
        found.append([loss, *(one.grad for one in of.parameters()), *of.buffers()])
    assert all(map(torch.equal, *found))


def test_nothing_is_left():
    before = FakeTensorMode._dispatch_impl
    with eager_layouts():
        assert FakeTensorMode._dispatch_impl is not before
    assert FakeTensorMode._dispatch_impl is before


WIDE, TALL = torch.randn(4, 3, 5).transpose(1, 2), torch.randn(4, 1, 5).transpose(1, 2)
LAST = torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
OPERATORS = {
    "copysign": lambda: WIDE.copysign(TALL),
    "copysign of a number": lambda: WIDE.copysign(-1),
    "div": lambda: WIDE.div(TALL, rounding_mode="trunc"),
    "div of numbers": lambda: WIDE.div(2.5, rounding_mode="floor"),
    "floor_divide": lambda: WIDE.floor_divide(torch.tensor(2.5)),
    "heaviside": lambda: torch.ones(4, 5, 1).heaviside(WIDE),
    "logical_and": lambda: torch.ones(4, 5, 1).logical_and(WIDE),
    "logaddexp": lambda: torch.ones(4, 5, 1).logaddexp(WIDE),
    "xlogy": lambda: torch.ones(4, 5, 3).xlogy(WIDE),
    "xlog1py": lambda: torch.special.xlog1py(torch.ones(4, 5, 3), WIDE),
    "ldexp": lambda: torch.ones(4, 5, 1).ldexp(WIDE),
    "ldexp in double": lambda: torch.ones(4, 5, 1).double().ldexp(WIDE.double()),
    "a power of a number": lambda: 2.0**WIDE,
    "angle": lambda: torch.complex(WIDE, WIDE).angle(),
    "angle of what is real": lambda: WIDE.angle(),
    "normal": lambda: torch.normal(WIDE, 1.0),
    "normal around a number": lambda: torch.normal(0.5, WIDE.abs()),
    "normal of both": lambda: torch.normal(WIDE, WIDE.abs()),
    "channel_shuffle": lambda: torch.channel_shuffle(LAST.repeat(1, 2, 1, 1).contiguous(
        memory_format=torch.channels_last), 2),
    "max_unpool2d": lambda: max_unpool2d(*max_pool2d(LAST, (2, 5), return_indices=True), (2, 5)),
    "reflection_pad3d": lambda: pad(LAST, (1, 1, 1, 1, 1, 1), "reflect"),
    "replication_pad3d": lambda: pad(LAST, (1, 1, 1, 1, 1, 1), "replicate"),
    "glu": lambda: torch.ops.aten.glu_backward(LAST[..., :2], LAST[..., :4], 3),
    "logit": lambda: torch.ops.aten.logit_backward(torch.ones(4, 5, 3), WIDE),
    "half of what is expanded": lambda: TALL[:1, :1].bfloat16().expand(4, 5, 3) * WIDE.bfloat16(),
    "two dtypes of what is expanded": lambda: TALL[:1, :1].half().expand(4, 5, 3) + WIDE,
    "masked_fill of what is expanded": lambda: TALL.half().expand(4, 5, 3).masked_fill(WIDE > 0, 1),
    "binary_cross_entropy of what is expanded": lambda: torch.ops.aten.binary_cross_entropy_backward(
        torch.ones(4, 5, 3), torch.full((3,), 0.5).expand(4, 5, 3), WIDE.sigmoid()),
    "relu": lambda: torch.ops.aten.threshold_backward(WIDE, TALL[:1, :1].expand(4, 5, 3), 0),
    "leaky_relu": lambda: torch.ops.aten.leaky_relu_backward(WIDE, TALL[:1, :1].expand(4, 5, 3), 0.1, False),
    "logsigmoid": lambda: torch.ops.aten.log_sigmoid_backward(TALL[:1, :1].expand(4, 5, 3), WIDE, WIDE),
    "mish in half precision": lambda: torch.ops.aten.mish_backward(
        TALL[:1, :1].bfloat16().expand(4, 5, 3), WIDE.bfloat16()),
    "losses in half precision": lambda: mse_loss(
        TALL[:1, :1].half().expand(4, 5, 3), WIDE.half(), reduction="none"),
    "rsub in half precision": lambda: torch.rsub(WIDE.half(), TALL[:1, :1].half().expand(4, 5, 3)),
    "half of what is expanded and a mask": lambda: TALL[:1, :1].bfloat16().expand(4, 5, 3) * (WIDE > 0),
    "a mask that is expanded and half": lambda: WIDE.bfloat16() * (TALL[:1, :1] > 0).expand(4, 5, 3),
    "huber_loss": lambda: huber_loss(TALL[:1, :1].expand(4, 5, 3), WIDE, reduction="none"),
    "complex": lambda: torch.complex(TALL[:1, :1].expand(4, 5, 3), WIDE),
    "polar": lambda: torch.polar(TALL[:1, :1].expand(4, 5, 3), WIDE),
    "a pad that is taken back": lambda: torch.ops.aten.replication_pad2d_backward(
        torch.ones(2, 3, 4, 7), LAST, (1, 1, 0, 0)),
}


@few(10)
@pytest.mark.parametrize("run", OPERATORS.values(), ids=OPERATORS)
def test_an_operator_of_a_trace_lies_as_that_of_eager(run):
    with FakeTensorMode(allow_non_fake_inputs=True), eager_layouts():
        traced = run()
    assert traced.stride() == run().stride()


def test_a_power_in_front_of_a_dropout():
    """A trace took it for transposed, and left out its copy: the mask was another."""
    net = nn.Sequential(nn.Linear(5, 5), Function(lambda x: dropout((2.0**x.t()).contiguous(), 0.5)))
    x = torch.randn(3, 5)
    compare(net, graph.rematerialize(net, x), x)


IN_PLACE = {
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 0.5),
    "scatter_": lambda x: x.scatter_(0, torch.zeros_like(x[:1], dtype=torch.long), 0.5),
    "cumsum_": lambda x: x.cumsum_(0),
    "index_fill_": lambda x: x.index_fill_(0, (x[0, :2] > 0).long(), 0.5),
    "add_": lambda x: x.add_(1),
    "unsqueeze_": lambda x: x.unsqueeze_(0).squeeze_(0),
    "transpose_": lambda x: x.transpose_(0, 1).transpose_(0, 1),
}


@few(1)
@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_what_is_changed_in_place_lies_as_before(change):
    """The mask of the dropout has its numbers in the order of memory."""

    def function(x):
        x = x.transpose(0, 1).sin()
        change(x)
        return dropout(x, 0.5), x

    net, x = nn.Sequential(nn.Linear(7, 7), Function(function)), torch.randn(5, 7)
    step = graph.rematerialize(net, x, keep="memory")
    compare(net, step, x, loss=lambda outputs: (outputs[0] * outputs[1]).sum())
    assert step(x)[1].stride() == net(x)[1].stride() == (1, 7)


def test_what_an_operator_writes_its_result_to_lies_as_before():
    def function(x):
        result = torch.empty(7, 5).t()
        torch.mul(x.detach(), 2, out=result)
        return (dropout(result, 0.5) * x).contiguous()  # torch 2.11 lays the gradient of another one out otherwise

    net, x = nn.Sequential(nn.Linear(7, 7), Function(function)), torch.randn(5, 7)
    compare(net, graph.rematerialize(net, x), x)


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_is_changed_in_place_lies_as_before_under_a_backend():
    def function(x):
        x = x.transpose(0, 1).sin()
        return dropout(x.masked_fill_(x > 0, 0.5), 0.5)

    net, x = nn.Sequential(nn.Linear(7, 7), Function(function)), torch.randn(5, 7)
    compare(net, torch.compile(net, backend=graph.backend(inner="eager"), dynamic=False), x)


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="a trace has another formula there (docs/limits.md)")
def test_what_a_formula_of_autograd_changes_in_place_lies_as_before():
    """That of a maximum fills a gradient in place. What is summed over it is summed in the order of memory."""

    def function(x):
        weight, bias = torch.arange(450.0).sin().view(9, 10, 5), x[0].view(5, 10).t() * 0.5
        return (torch.maximum(x.view(9, 5, 10).transpose(1, 2), bias).sin() * weight).sum()

    net, x = nn.Sequential(nn.Linear(50, 50), Function(function)), torch.randn(9, 50)
    compare(net, graph.rematerialize(net, x), x)


GRADIENTS = {
    "mse_loss": lambda x, y: mse_loss(x, y),
    "smooth_l1_loss": lambda x, y: smooth_l1_loss(x, y, reduction="none").sin(),
    "huber_loss": lambda x, y: huber_loss(x, y),
    "binary_cross_entropy": lambda x, y: binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "elu": lambda x, y: elu(x) * y,
    "hardswish": lambda x, y: hardswish(x) * y,
    "hardsigmoid": lambda x, y: hardsigmoid(x) * y,
    "relu6": lambda x, y: relu6(x) * y,
    "softplus": lambda x, y: softplus(x) * y,
    "logsigmoid": lambda x, y: logsigmoid(x) * y,
    "log_softmax": lambda x, y: log_softmax(x, -1) * y,
    "layer_norm": lambda x, y: layer_norm(x, (8,)) * y,
    "dropout": lambda x, y: dropout(x, 0.5) * y,
}


class Grouped(nn.Module):
    """A norm whose backward takes the gradient for contiguous, and which eager makes contiguous where it is not."""

    def __init__(self, read):
        super().__init__()
        self.norm, self.read = nn.GroupNorm(2, 8), read

    def forward(self, x, y):
        return self.read(self.norm(x.transpose(1, 2)).transpose(1, 2), y).sum()


@few(1)
@pytest.mark.parametrize("read", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_lie_as_those_of_eager(read):
    model, x, y = Grouped(read), torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    compare(model, graph.rematerialize(model, x, y), x, y, loss=lambda loss: loss)


def test_a_gradient_in_half_precision_lies_as_that_of_eager():
    """That of a sum is expanded. Times what is transposed, it was taken for contiguous."""

    class Added(Grouped):
        def forward(self, x, y):
            return (y.transpose(1, 2) + self.norm(x.transpose(1, 2).contiguous())).sin().sum()

    model, x, y = Added(None).bfloat16(), torch.randn(3, 5, 8).bfloat16(), torch.randn(3, 5, 8).bfloat16()
    compare(model, graph.rematerialize(model, x, y), x, y, loss=lambda loss: loss)


@pytest.mark.usefixtures("fresh_dynamo")
def test_gradients_of_a_backend_lie_as_those_of_eager():
    model, x, y = Grouped(mse_loss), torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    call = torch.compile(model, backend=graph.backend(inner="eager"), dynamic=False)
    compare(model, call, x, y, loss=lambda loss: loss)
