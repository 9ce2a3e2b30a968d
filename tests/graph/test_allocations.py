"""Bytes of known allocations, and of steps beside the storages that their operators return."""
from __future__ import annotations

import gc

import pytest
import torch

from tests.graph.allocations import live_bytes, measured_peak
from tests.models import MODELS
from tests.regions.test_memory import LiveStorages
from tests.slow import few, slow

MB = 10**6


def megabyte():
    return torch.empty(MB // 4)


def test_three_tensors_one_freed_in_between():
    def function():
        a, b = megabyte(), megabyte()
        del a
        c, d = megabyte(), megabyte()
        return b, c, d

    assert live_bytes(function) == [1 * MB, 2 * MB, 1 * MB, 2 * MB, 3 * MB, 2 * MB, 1 * MB, 0]
    assert measured_peak(function) == 3 * MB


def test_nothing_allocated_is_nothing():
    assert live_bytes(lambda: None) == []
    assert measured_peak(lambda: None) == 0


def test_a_byte_is_a_byte():
    assert measured_peak(lambda: torch.empty(1, dtype=torch.uint8)) == 1
    assert measured_peak(lambda: torch.empty(12_345, dtype=torch.uint8)) == 12_345


def test_views_and_in_place_operators_take_nothing():
    x = torch.zeros(10)
    assert measured_peak(lambda: x[2:].view(2, 4).transpose(0, 1).neg_()) == 0


def test_temporary_inside_a_kernel_counts():
    """A product of matrices copies an operand that lies in memory with gaps; no operator returns that copy."""
    gaps, dense = torch.randn(500, 1000)[:, ::2], torch.randn(500, 500)
    assert live_bytes(lambda: torch.mm(gaps, dense)) == [1 * MB, 2 * MB, 1 * MB, 0]
    assert live_bytes(lambda: torch.mm(dense, dense)) == [1 * MB, 0]


@pytest.mark.parametrize("nodes", [2, 3, 10])
def test_backward_of_a_chain_of_tanh(nodes):
    """Results of all but the input; the loss and its gradient, 4 bytes each; the gradients of the last two nodes."""
    case = MODELS["tanh_chain"](nodes=nodes)
    inputs = case.make_inputs(0)
    assert measured_peak(lambda: case.backward(*inputs)) == nodes * MB + 8


def test_what_was_there_before_counts_for_nothing_even_where_it_is_freed():
    kept = [megabyte()]

    def function():
        kept.clear()
        megabyte()

    assert live_bytes(function) == [MB, 0]


def test_free_of_memory_at_an_address_of_an_earlier_profile_does_not_count():
    kept = []
    for _ in range(3):
        live_bytes(lambda: kept.append(megabyte()))
        kept.clear()
        kept.append(megabyte())  # where the one before was, as a rule
        assert live_bytes(kept.clear) == []


def test_what_a_reference_cycle_holds_is_alive():
    gc.collect()

    def function():
        for _ in range(3):
            cycle = [megabyte()]
            cycle.append(cycle)
            del cycle
            list(map(list, [()] * 10_000))  # enough for the collector to run, if it did

    assert live_bytes(function)[-1] == 3 * MB
    assert gc.isenabled()
    gc.collect()


@few(1)
@pytest.mark.parametrize("name", ["mlp24", "gpt6", "resnet20", "unet", *slow(["lstm50"])])
def test_peak_is_at_least_that_of_the_storages_that_operators_return(name):
    case = MODELS[name]()
    inputs = case.make_inputs(0)
    with LiveStorages() as live:
        case.backward(*inputs)
    case.model.zero_grad()
    assert measured_peak(lambda: case.backward(*inputs)) >= live.peak_bytes > 0


def test_peak_of_elementwise_operators_is_that_of_the_storages_that_they_return():
    case = MODELS["tanh_chain_residual"](nodes=20, elements=1000)
    inputs = case.make_inputs(0)

    def loss_and_gradient():
        return torch.autograd.grad(case.loss(case.model(*inputs)), inputs)

    with LiveStorages() as live:
        loss_and_gradient()
    assert measured_peak(loss_and_gradient) == live.peak_bytes


def test_peak_is_the_same_each_time():
    case = MODELS["resnet20"]()
    inputs = case.make_inputs(0)

    def peak():
        case.model.zero_grad()
        return measured_peak(lambda: case.backward(*inputs))

    assert len({peak() for _ in range(3)}) == 1
