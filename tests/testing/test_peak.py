"""The most bytes that a step takes, to the byte."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers import Block, assert_equal, leaf, run
from torchckpt import ArgumentError, checkpoint
from torchckpt.testing import peak_bytes

SIZE = 1024
BYTES = 4 * SIZE


def test_the_peak_of_a_step_by_hand(device):
    x = torch.ones(SIZE, device=device)

    def step():
        y = x + 1  # one
        z = y * 2  # two
        del y
        z += 1
        return z.sin()  # two again

    assert peak_bytes(step, device) == 2 * BYTES
    assert peak_bytes(lambda: [x + 1 for _ in range(5)], device) == 5 * BYTES
    assert peak_bytes(lambda: x.view(2, -1).t(), device) == 0


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_peak_of_a_higher_order_operator():
    x = torch.ones(SIZE)
    assert peak_bytes(lambda: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)), "cpu") >= BYTES


def test_the_peak_of_a_backward_by_hand(device):
    x = leaf(SIZE, device=device)
    x.grad = torch.zeros_like(x)

    def step():
        y = x.exp()  # one, which the backward needs
        y.backward(torch.ones_like(y))  # two; and three where the gradient is multiplied

    assert peak_bytes(step, device) == 3 * BYTES


def test_a_region_lowers_the_peak():
    blocks = nn.Sequential(*(Block(64) for _ in range(8)))

    def step(call):
        y = torch.ones(16, 64)
        for block in blocks:
            y = call(block, y)
        y.sum().backward()

    step(checkpoint)  # the gradients are there
    plain = peak_bytes(lambda: step(lambda block, y: block(y)), "cpu")
    regions = peak_bytes(lambda: step(checkpoint), "cpu")
    assert regions < plain / 2


def test_what_was_there_before_does_not_count():
    x = torch.ones(SIZE)
    assert peak_bytes(lambda: x.add_(1), "cpu") == 0
    assert peak_bytes(lambda: x + 1, "cpu") == peak_bytes(lambda: x + 1, "cpu") == BYTES


def grow(tensor):
    tensor.resize_(SIZE)


@pytest.mark.parametrize(
    ("step", "peak"),
    [
        (lambda: grow(torch.empty(0)), BYTES),
        (lambda: grow(torch.empty(SIZE // 2)), BYTES),
        (lambda: torch.sin(torch.empty(SIZE), out=torch.empty(0)), 2 * BYTES),
        (lambda: torch.topk(torch.empty(SIZE), SIZE, out=(torch.empty(0), torch.empty(0).long())), 4 * BYTES),
        (lambda: torch.empty(0).resize_as_(torch.empty(SIZE)), 2 * BYTES),
        (lambda: torch.empty(0).set_(torch.empty(SIZE)), BYTES),
        (lambda: torch.empty(SIZE).resize_(0).resize_(SIZE), BYTES),
    ],
    ids=["resize_", "resize_ of some", "out", "two outputs", "resize_as_", "set_", "smaller and back"],
)
def test_a_storage_that_grows_counts_as_large_as_it_is(step, peak):
    assert peak_bytes(step, "cpu") == peak


def test_a_storage_from_before_counts_once_it_grows():
    there = torch.empty(0)
    assert peak_bytes(lambda: torch.sin(torch.ones(SIZE), out=there), "cpu") == 2 * BYTES
    assert peak_bytes(lambda: torch.sin(torch.ones(SIZE), out=there), "cpu") == BYTES


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor, torch.Tensor])
def test_a_tensor_of_a_list_counts(make):
    values = [1.0] * SIZE
    assert peak_bytes(lambda: make(values), "cpu") == BYTES
    assert peak_bytes(lambda: make(values) + 1, "cpu") == 2 * BYTES


def test_borrowed_memory_does_not_count():
    memory = bytearray(BYTES)
    assert peak_bytes(lambda: torch.asarray(memory, dtype=torch.float32), "cpu") == 0


@pytest.mark.accelerator
def test_the_accelerator_is_the_default_where_it_is_used(accelerator):
    x = torch.ones(SIZE, device=accelerator)
    assert peak_bytes(lambda: x + 1) == BYTES


@pytest.mark.accelerator
def test_a_step_that_takes_nothing_where_it_is_counted(accelerator):
    resident, x = torch.ones(SIZE, device=accelerator), torch.ones(SIZE)
    rest = r".*, where the step takes nothing; works: peak_bytes\(step, 'cpu'\)"
    with pytest.warns(UserWarning, match=rf"peak_bytes\(\) has counted on {accelerator.type}{rest}"):
        assert peak_bytes(lambda: x + 1) == 0
    assert peak_bytes(lambda: x + 1, "cpu") == resident.nbytes


def test_gradients_are_those_without_counting():
    def counted(block, x):
        outputs = []
        peak_bytes(lambda: outputs.append(block(x)), "cpu")
        return outputs[0]

    block, x = Block(), leaf(3, 4)
    assert_equal(run(counted, block, x, modules=[block]), run(block, x, modules=[block]))


def test_a_step_that_is_not_callable():
    with pytest.raises(ArgumentError) as caught:
        peak_bytes(3)
    assert str(caught.value).splitlines() == [
        "peak_bytes(): the step is not callable",
        "  received: int",
        "  works:    peak_bytes(lambda: model(x).sum().backward())",
    ]


@pytest.mark.parametrize("device", ["foo", "xla", 7.5])
def test_a_device_that_is_not_there(device):
    said = r"peak_bytes\(\): there is no such device here\n  received: .*\n  works:    peak_bytes\(step, 'cpu'\)"
    with pytest.raises(ArgumentError, match=said):
        peak_bytes(lambda: None, device)
