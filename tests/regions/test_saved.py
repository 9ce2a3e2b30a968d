"""The bytes that autograd keeps: each storage once, whole; parameters not."""
from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.helpers import Block, assert_equal, in_thread, leaf, plain, run
from torchckpt import checkpoint
from torchckpt.regions.core.scope import Scope
from torchckpt.regions.saved import bytes_of, saved_bytes

SIZE = 1024
BYTES = 4 * SIZE


def saved_by(function, *args):
    with saved_bytes() as saved:
        outputs = function(*args)
    del outputs
    return saved.total


@pytest.mark.parametrize("requires_grad", [True, False], ids=["requires grad", "does not"])
def test_inputs_count_whoever_holds_them(device, requires_grad):
    x = torch.randn(SIZE, device=device, requires_grad=requires_grad)
    weight = leaf(SIZE, device=device)
    assert saved_by(lambda: x * weight) == (2 if requires_grad else 1) * BYTES
    assert saved_by(lambda: checkpoint(torch.mul, x, weight)) == 2 * BYTES


def test_parameters_do_not_count(device):
    weight, x = nn.Parameter(torch.randn(SIZE, device=device)), leaf(SIZE, device=device)
    assert saved_by(lambda: x * weight) == BYTES
    assert saved_by(lambda: weight.sin()) == 0
    assert saved_by(lambda: checkpoint(torch.mul, x, weight)) == BYTES


@pytest.mark.parametrize(
    "view",
    [lambda w: w.t(), lambda w: w.view(-1), lambda w: w[3:], lambda w: w.t()[1:].unsqueeze(0)],
    ids=["transposed", "reshaped", "part", "view of a view"],
)
def test_views_of_parameters_do_not_count(device, view):
    weight = nn.Parameter(torch.randn(32, 32, device=device))
    assert saved_by(lambda: view(weight).sin()) == 0


def test_what_is_made_of_parameters_counts(device):
    weight = nn.Parameter(torch.randn(SIZE, device=device))
    assert saved_by(lambda: (weight * 2).sin()) == BYTES
    assert saved_by(lambda: weight.double().sin()) == 2 * BYTES
    assert saved_by(lambda: weight.detach() * leaf(SIZE, device=device)) == BYTES  # no parameter any more


def test_buffers_count(device):
    norm, x = nn.BatchNorm1d(SIZE).to(device).eval(), leaf(2, SIZE, device=device)
    of_kernel = 2 * BYTES if device.type == "cuda" else 0  # a mean and a deviation, which are saved in evaluation, too
    assert saved_by(norm, x) == 2 * BYTES + 2 * BYTES + of_kernel  # x, and the running mean and variance


def test_each_storage_counts_once_and_whole(device):
    x = leaf(SIZE, device=device)
    assert saved_by(lambda: [x.sin(), x.cos(), x[:10].sin(), x.view(2, -1).sin()]) == BYTES
    parts = leaf(4, SIZE, device=device)
    assert saved_by(lambda: parts[0].sin()) == 4 * BYTES


def test_a_storage_at_an_address_that_was_used_before_is_another(device):
    def steps():
        for _ in range(5):
            leaf(SIZE, device=device).sin().sum().backward()

    assert saved_by(steps) == 5 * BYTES


def test_of_a_region_the_boundary_counts(device):
    block, x = Block().to(device), leaf(3, 4, device=device)
    assert saved_by(checkpoint, block, x) == x.nbytes
    assert saved_by(checkpoint, lambda x: checkpoint(block, block(x)), x) == x.nbytes


def test_of_a_region_that_keeps_what_it_saves_all_counts(device):
    block, x = Block().to(device), leaf(3, 4, device=device)
    with Scope(keep=True).entered():
        kept = saved_by(checkpoint, block, x)
    assert kept == saved_by(block, x) > x.nbytes


def test_other_threads_do_not_count(device):
    x = leaf(SIZE, device=device)
    assert saved_by(in_thread, x.sin) == 0


def test_counting_ends_with_the_block(device):
    x = leaf(SIZE, device=device)
    with pytest.raises(ValueError, match="the pump is off"), saved_bytes() as saved:
        raise ValueError("the pump is off")
    x.sin()
    assert saved.total == 0


def test_counted_tensors_die_with_their_graph(device):
    x = leaf(SIZE, device=device)
    with saved_bytes() as saved:
        hidden = x * 2
        y = hidden.sin()
    storage = weakref.ref(hidden.untyped_storage())
    del hidden, y
    gc.collect()
    assert storage() is None
    assert saved.total == BYTES


@pytest.mark.parametrize("call", [plain, checkpoint], ids=["plain", "checkpoint"])
def test_gradients_are_those_without_counting(device, call):
    def counted(block, x):
        with saved_bytes():
            return call(block, x)

    block, x = Block().to(device), leaf(3, 4, device=device)
    assert_equal(run(counted, block, x, modules=[block]), run(call, block, x, modules=[block]))


def test_bytes_of_tensors_are_those_of_their_storages(device):
    x, weight = torch.randn(SIZE, device=device), nn.Parameter(torch.randn(SIZE, device=device))
    assert bytes_of([]) == 0
    assert bytes_of([x, x[3:], x.view(2, -1), weight.detach()]) == 2 * BYTES
    assert bytes_of([x, weight.detach()], but=[weight, torch.ones(3, device=device)]) == BYTES


@pytest.mark.parametrize("changed", ["input", "result", "weight"])
def test_what_is_changed_in_place_is_an_error_as_without_it(changed):
    """Torch compares no versions of what saved-tensor hooks have."""

    def backward():
        x, layer = leaf(4, 4) * 1, nn.Linear(4, 4)
        y = layer(x).exp()
        tensors = {"input": x, "result": y, "weight": layer.weight}
        with torch.no_grad():
            tensors[changed].add_(1)
        y.sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), saved_bytes():
        backward()
