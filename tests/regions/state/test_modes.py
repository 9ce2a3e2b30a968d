"""Dispatch modes around the forward alone, or the backward alone: composite operators then work in place less often."""
from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers import by_hand
from tests.slow import few
from torchckpt import checkpoint
from torchckpt.errors import RecomputationError

AROUND = pytest.mark.parametrize("around", ["forward", "backward", "both"])


def counter(around, what):
    return FlopCounterMode(display=False) if around in (what, "both") else nullcontext()


@few(4)
@AROUND
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("check", ["default", "values"])
@pytest.mark.parametrize("call", [checkpoint, by_hand])
def test_linear_that_adds_its_bias_in_place_and_a_relu_in_place(call, around, is_frozen, check, device):
    first = nn.Linear(4, 4).requires_grad_(not is_frozen)
    block = nn.Sequential(first, nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(4, 4), nn.Tanh()).to(device)
    base = torch.randn(2, 4, 3, device=device, requires_grad=not is_frozen)
    leaves = [leaf for leaf in [base, *block.parameters()] if leaf.requires_grad]

    def program(x):
        hidden = call(lambda x: block(x).sin(), x, determinism_check=check)  # a region in a region
        return hidden * 2

    def gradients(call, around):
        torch.manual_seed(1)
        with counter(around, "forward"):
            output = call(base.transpose(1, 2))
        with counter(around, "backward"):
            return torch.autograd.grad(output.exp().sum(), leaves)

    expected = gradients(lambda x: block(x).sin() * 2, "nothing")
    assert all(map(torch.equal, gradients(program, around), expected))
    assert all(map(torch.equal, gradients(lambda x: checkpoint(program, x), around), expected))


@AROUND
def test_tensor_of_the_outside_that_changes_in_place_is_still_an_error(around):
    factor, x = torch.ones(3), torch.randn(3, requires_grad=True)
    with counter(around, "forward"):
        loss = checkpoint(lambda x: (x * factor).exp(), x).sum()
    factor.mul_(2)
    with counter(around, "backward"), pytest.raises(RecomputationError, match="it is at version 1; expected version 0"):
        loss.backward()


@AROUND
def test_tensor_of_the_outside_that_the_function_writes_again_is_still_an_error(around):
    total, x = torch.zeros(3), torch.randn(3, requires_grad=True)

    def function(x):
        total.add_(x.detach())
        return (x * total).exp()

    with counter(around, "forward"):
        loss = checkpoint(function, x).sum()
    with counter(around, "backward"), pytest.raises(RecomputationError, match="it is at version 2; expected version 1"):
        loss.backward()


@pytest.mark.parametrize("around", ["forward", "backward"])
def test_flops_are_those_of_the_plain_call_and_of_the_replay(around):
    block, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 3, 4, requires_grad=True)
    with counter(around, "forward") as forward:
        loss = checkpoint(lambda x: block(x).exp(), x).sum()
    with counter(around, "backward") as backward:
        loss.backward()
    product = 2 * 6 * 4 * 4
    if around == "forward":
        assert forward.get_total_flops() == 2 * product
    else:
        assert backward.get_total_flops() == (4 + 2) * product
