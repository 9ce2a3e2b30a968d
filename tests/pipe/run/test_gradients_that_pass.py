"""Gradients of parameters have memory of their own: autograd may give two, or one and a cut, the same."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from torchckpt import Pipe
from torchckpt.pipe.skip import pop, stash


class Shift(nn.Module):
    """Adds a bias. The gradient of a single row is that of its input, and ``[None]`` makes a view of it."""

    def __init__(self, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4)) if bias is None else bias

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias[None]


class Keeps(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        stash("y", y)
        return y.tanh()


class ShiftsWhatWasKept(Shift):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(pop("y"))


def skipped() -> nn.Sequential:
    return nn.Sequential(Keeps(4, 4), nn.Linear(4, 4), ShiftsWhatWasKept())


def tied() -> nn.Sequential:
    first = Shift()
    return nn.Sequential(first, nn.Linear(4, 4), Shift(), Shift(first.bias))


def beside_another() -> nn.Sequential:
    """The gradients of both biases of one layer are views of its own; one of them is that of another stage, too."""
    first = Shift()
    return nn.Sequential(first, nn.Linear(4, 4), nn.Sequential(Shift(), Shift(first.bias)), nn.Linear(4, 4))


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("make", [skipped, tied, beside_another])
def test_what_is_added_to_the_gradient_of_a_parameter_goes_into_no_other(make, chunks, checkpoint):
    torch.manual_seed(0)
    plain, x = make().double(), torch.randn(chunks, 4, dtype=torch.float64)
    pipe = Pipe(copy.deepcopy(plain), [1] * len(plain), chunks=chunks, checkpoint=checkpoint)
    pipe.step(x, x, loss_fn=lambda output, target: (output - target).square().sum(), reduce="sum")
    for row in x.split(1):
        (plain(row) - row).square().sum().backward()
    for expected, found in zip(plain.parameters(), pipe.parameters()):
        torch.testing.assert_close(found.grad, expected.grad)


class PlainShift(Shift):
    """The same of a tensor that is no parameter."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__(nn.Parameter(torch.zeros(4)))
        self.leaf = bias

    def forward(self, x: Tensor) -> Tensor:
        return x + self.leaf[None]


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_so_it_does_where_a_leaf_that_is_no_parameter_accumulates(chunks, checkpoint):
    torch.manual_seed(0)
    leaf, x = torch.randn(4, dtype=torch.float64, requires_grad=True), torch.randn(chunks, 4, dtype=torch.float64)
    plain = nn.Sequential(PlainShift(leaf), nn.Linear(4, 4), PlainShift(leaf), PlainShift(leaf)).double()
    for row in x.split(1):
        (plain(row) - row).square().sum().backward()
    expected, leaf.grad = [leaf.grad, *(weight.grad for weight in plain[1].parameters())], None
    plain.zero_grad()
    pipe = Pipe(plain, [1] * len(plain), chunks=chunks, checkpoint=checkpoint)
    pipe.step(x, x, loss_fn=lambda output, target: (output - target).square().sum(), reduce="sum")
    for gradient, found in zip(expected, [leaf.grad, *(weight.grad for weight in plain[1].parameters())]):
        torch.testing.assert_close(found, gradient)
