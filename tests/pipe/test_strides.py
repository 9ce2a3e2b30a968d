"""Layers find their inputs with the strides of the plain model, by which torch chooses kernels and so the last bits."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.functional import mse_loss

from tests.pipe.budget.models import WAYS
from tests.slow import few
from torchckpt import Pipe, is_recomputing
from torchckpt.pipe import NoChunk

WIDTH = 64
VIEWS = {
    "gaps": lambda x: x[..., :WIDTH],
    "every second": lambda x: x[..., ::2],
    "repeats": lambda x: x[..., :1].expand(*x.shape[:-1], WIDTH),
    "repeats with gaps": lambda x: x[:, :1, :WIDTH].expand(-1, x.shape[1], -1),
    "transposed": lambda x: x[..., :WIDTH].contiguous().transpose(0, 1).contiguous().transpose(0, 1),
}


class Up(nn.Module):
    """Returns a view of what it has made."""

    def __init__(self, view: str) -> None:
        super().__init__()
        self.view, self.linear = view, nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.bfloat16)

    def forward(self, x):
        return VIEWS[self.view](self.linear(x))


class Down(nn.Module):
    """Notes the strides of its input, which it may change in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place, self.linear = in_place, nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.strides: list[tuple[int, ...]] = []

    def forward(self, x):
        if not is_recomputing():
            self.strides.append(x.stride())
        return self.linear(x.relu_() if self.in_place else x)


def loss_of(output, target):
    return mse_loss(output.float(), target.expand_as(output))


def step(model, x, way):
    """The loss, the gradients, and the strides that a step of a pipe or a plain model has found."""
    down = model[1]
    down.strides.clear()
    target = torch.zeros(len(x), 1, 1)
    if way == "step":
        loss = model.step(x, target, loss_fn=loss_of)
    else:
        loss = loss_of(model(x), target)
        loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return [loss.detach(), *gradients], {*down.strides}


@few(6)
@pytest.mark.parametrize("budget", [None, "100%"])
@pytest.mark.parametrize("balance", [[2], [1, 1]], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_a_layer_finds_the_strides_of_the_plain_model(view, in_place, way, balance, budget):
    torch.manual_seed(0)
    plain = nn.Sequential(Up(view), Down(in_place and "repeats" not in view))  # what repeats cannot be changed in place
    pipe = Pipe(copy.deepcopy(plain), balance, ["cpu"] * len(balance), 1, budget=budget)
    x = torch.randn(4, 16, WIDTH).bfloat16()
    expected, strides = step(plain, x, "graph")
    for _ in range(3):
        found, of_pipe = step(pipe, x, way)
        assert of_pipe == strides
        assert all(map(torch.equal, found, expected))


class Turned(nn.Linear):
    """Returns a view whose rows are columns in memory."""

    def forward(self, x):
        return super().forward(x).t().contiguous().t()


class Adds(nn.Linear):
    """Adds in place what it learns. The backward of that sums up a gradient, and a view's lies as the view does not."""

    def forward(self, x):
        return super().forward(x.add_(self.bias))


@pytest.mark.parametrize("options", [{"budget": "100%"}, {"checkpoint": "always"}, {"checkpoint": "never"}], ids=str)
@pytest.mark.parametrize("balance", [[3], [1, 2]], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_view_that_a_layer_changes_in_place_is_a_view_behind_a_copy_or_a_cut(way, balance, options):
    torch.manual_seed(0)
    plain = nn.Sequential(Turned(WIDTH, WIDTH), Adds(WIDTH, WIDTH), nn.Sequential(nn.Tanh()))
    pipe, x = Pipe(copy.deepcopy(plain), balance, ["cpu"] * len(balance), 1, **options), torch.randn(40, WIDTH)
    assert_gradients_of(plain, pipe, x, way)


class Straight(torch.autograd.Function):
    """A mean, repeated, with the gradient of the values that it is of."""

    @staticmethod
    def forward(ctx, x):
        return x.mean(1, keepdim=True).expand_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Averages(nn.Linear):
    def forward(self, x):
        return Straight.apply(super().forward(x))


@pytest.mark.parametrize("options", [{"budget": "100%"}, {"checkpoint": "always"}, {"checkpoint": "never"}], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_repeats_have_a_gradient_each(way, options):
    torch.manual_seed(0)
    plain = nn.Sequential(Averages(8, 8), nn.Linear(8, 8), nn.Tanh())
    pipe, x = Pipe(copy.deepcopy(plain), [1, 2], ["cpu"] * 2, 1, **options), torch.randn(6, 8)
    assert_gradients_of(plain, pipe, x, way)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_repeats_of_the_caller_have_a_gradient_each(checkpoint):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), torch.randn(8, 1).expand(8, 6).requires_grad_()
    pipe = Pipe(model, [1, 1], chunks=2, checkpoint=checkpoint)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(pipe(x).sum(), x)[0], expected)


class Sums(nn.Module):
    """Its backward gives its input a gradient that lies in memory as columns, or as one number for all."""

    def __init__(self, repeats: bool) -> None:
        super().__init__()
        self.repeats = repeats

    def forward(self, x):
        return x.sum(1, keepdim=True) * torch.ones(1, 4) if self.repeats else x.t().contiguous().square().t()


@pytest.mark.parametrize("options", [{"budget": "100%"}, {"checkpoint": "always"}, {"checkpoint": "never"}], ids=str)
@pytest.mark.parametrize("repeats", [False, True])
def test_a_gradient_passes_a_cut_as_it_lies(repeats, options):
    torch.manual_seed(0)
    strides: list[tuple[int, ...]] = []

    class Looks(nn.BatchNorm1d):
        def forward(self, x):
            output = super().forward(x)
            if not is_recomputing():
                output.register_hook(lambda grad: strides.append(grad.stride()))
            return output

    def loss(output, _):
        return output.t().contiguous().pow(3).mean()

    plain = nn.Sequential(Looks(6), Sums(repeats), nn.Sequential(nn.Tanh()))
    pipe, x = Pipe(copy.deepcopy(plain), [1, 2], ["cpu"] * 2, 2, **options), torch.randn(30, 6)
    for part in x.split(15):
        (loss(plain(part), None) * 0.5).backward()
    expected = strides[:]
    for _ in range(3):
        strides.clear()
        pipe.step(x, x, loss_fn=loss)
        assert strides == expected
        assert all(torch.equal(*pair) for pair in zip(gradients_of(pipe), gradients_of(plain)))
        pipe.zero_grad()


def gradients_of(module):
    return [parameter.grad for parameter in module.parameters()]


def assert_gradients_of(plain, pipe, x, way):
    """Three steps of ``pipe`` have the gradients of one of ``plain``."""
    plain(x).square().mean().backward()
    for _ in range(3):
        if way == "step":
            pipe.step(x, x, loss_fn=lambda output, _: output.square().mean())
        else:
            pipe(x).square().mean().backward()
        assert all(torch.equal(*pair) for pair in zip(gradients_of(pipe), gradients_of(plain)))
        pipe.zero_grad()


class Tagged(torch.Tensor):
    pass


class Notes(nn.Linear):
    """Notes the class of its first input."""

    noted: type | None = None

    def forward(self, x):
        self.noted = self.noted or type(x)
        return super().forward(x)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_copy_with_gaps_has_the_class_of_its_input(checkpoint):
    layer = Notes(4, 4)
    Pipe(nn.Sequential(layer), chunks=2, checkpoint=checkpoint)(torch.randn(2, 8).as_subclass(Tagged)[:, ::2])
    assert layer.noted is Tagged


def test_a_copy_with_gaps_has_a_tangent():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 8)[:, ::2]
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(2, 4))
        expected, found = (forward_ad.unpack_dual(module(dual)).tangent for module in (model, Pipe(model)))
    assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_for_every_micro_batch():
    class Pads(nn.Linear):
        def forward(self, x, rows):
            return super().forward(x) + rows.to_padded_tensor(0.0).sum()

    rows = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])  # strided, and without strides
    layer, x = Pads(4, 4), torch.randn(4, 4)
    assert torch.equal(Pipe(nn.Sequential(layer), chunks=2)(x, NoChunk(rows)), layer(x, rows))
