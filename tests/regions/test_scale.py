"""Scale: many calls, many levels, many regions."""
from __future__ import annotations

import gc
from collections import Counter
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import plain
from tests.slow import few, slow
from torchckpt import Checkpointing, checkpoint, checkpoint_module, is_recomputing
from torchckpt.testing import count_recomputes

FEW = 5
"""Objects that a thread of the device may still hold. What each call left behind would be hundreds."""


def census():
    """Live objects: tensors, and those of regions, by their kind."""
    gc.collect()
    kinds = list(map(type, gc.get_objects()))
    ours = [kind for kind in kinds if issubclass(kind, Tensor) or str(kind.__module__).startswith("torchckpt.regions")]
    return Counter(kind.__qualname__ for kind in ours)


@few(1)
@pytest.mark.parametrize("many", [3_000, *slow([10_000])])
def test_calls_do_not_grow(device, many):
    x = torch.randn(2, device=device, requires_grad=True)

    def calls(number):
        for _ in range(number):
            torch.autograd.grad(checkpoint(torch.sin, x).sum(), x)

    calls(10)
    before = census()
    calls(many)
    assert (census() - before).total() < FEW


def test_calls_of_each_other_kind_do_not_grow():
    block, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout()), torch.randn(2, 4, requires_grad=True)
    checkpoint_module(block)

    def failing(x):
        if is_recomputing():
            raise ValueError("the pump is off")
        return x.sin()

    def calls(number):
        for _ in range(number):
            block(x)  # without a backward
            region = Checkpointing(torch.sin, x)
            region.recompute(region.checkpoint()).sum().backward()
            with suppress(ValueError):
                checkpoint(failing, x).sum().backward()

    calls(10)
    before = census()
    calls(500)
    assert (census() - before).total() < FEW


@few(1)
@pytest.mark.parametrize(("levels", "early_stop"), [(100, True), (30, False)])
def test_nested_levels_are_equal(levels, early_stop, device):
    x = torch.randn(4, dtype=torch.float64, device=device, requires_grad=True)

    def nest(call, level, x):
        return x.sin() if level == 0 else call(nest, call, level - 1, x.cos()) * 1.5

    def region(*args):
        return checkpoint(*args, early_stop=early_stop)

    (gradient,) = torch.autograd.grad(nest(region, levels, x).sum(), x)
    (expected,) = torch.autograd.grad(nest(plain, levels, x).sum(), x)
    assert torch.equal(gradient, expected)


def test_each_of_a_hundred_nested_levels_is_recomputed_once():
    def nest(level, x):
        return x.sin() if level == 0 else checkpoint(nest, level - 1, x.cos())

    loss = nest(100, torch.randn(4, requires_grad=True)).sum()
    with count_recomputes() as recomputes:
        loss.backward()
    assert recomputes.total == 100


@few(1)
def test_a_thousand_regions_in_a_row_are_equal(device):
    x = torch.randn(4, device=device, requires_grad=True)

    def chain(call):
        y = x
        for _ in range(1000):
            y = call(torch.sin, y)
        return torch.autograd.grad(y.sum(), x)[0]

    assert torch.equal(chain(checkpoint), chain(plain))
