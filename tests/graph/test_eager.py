"""Bytes of known allocations, and steps that differ in one thing."""
from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.graph.eager import assert_same, live_bytes, measured_peak, step
from tests.kernel.test_memory import LiveStorages
from tests.models import MODELS

MB = 10**6


def megabyte():
    return torch.empty(MB // 4)


# bytes ----------------------------------------------------------------------------------------------------------------


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
    held = [megabyte()]

    def function():
        held.clear()
        megabyte()

    assert live_bytes(function) == [MB, 0]


def test_free_of_memory_at_an_address_of_an_earlier_profile_does_not_count():
    held = []
    for _ in range(3):
        live_bytes(lambda: held.append(megabyte()))
        held.clear()
        held.append(megabyte())  # where the one before was, as a rule
        assert live_bytes(held.clear) == []


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


@pytest.mark.parametrize("name", ["mlp24", "gpt6", "resnet20", "lstm50", "unet"])
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


# a step ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def case():
    return MODELS["nested_outputs"]()


def of(case, seed=0, **options):
    return step(case.model, case.inputs, case.loss, seed, **options)


@pytest.mark.parametrize("name", ["gpt6", "resnet20", "sparse_embedding", "nested_outputs"])
def test_step_is_repeatable_and_leaves_nothing(name):
    case = MODELS[name]()
    rng, buffers = torch.get_rng_state(), [buffer.clone() for buffer in case.model.buffers()]
    assert_same(of(case), of(case))
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(map(torch.equal, case.model.buffers(), buffers))
    assert all(parameter.grad is None for parameter in case.model.parameters())


def test_step_names_gradients_of_parameters_and_inputs(case):
    result = of(case)
    assert set(result.gradients) == {*dict(case.model.named_parameters()), "inputs[0]"}
    assert [name for name, gradient in result.gradients.items() if gradient is None] == ["spare.weight", "spare.bias"]


def test_step_takes_the_statistics_that_batch_norm_has_updated():
    case = MODELS["resnet20"]()
    (name, before), *_ = [pair for pair in case.model.named_buffers() if pair[0].endswith("num_batches_tracked")]
    assert of(case).buffers[name] == before + 1


def test_step_runs_a_call_in_place_of_the_model(case):
    called = []

    def call(*inputs):
        called.append(len(inputs))
        return case.model(*inputs)

    assert_same(of(case, call=call), of(case))
    assert called == [1]


def test_step_keeps_no_graph(case):
    seen = []

    def call(x):
        y = x.sin()
        seen.append(weakref.ref(y))
        return case.model(y)

    result = of(case, call=call)
    assert result.outputs[0].requires_grad
    assert seen[0]() is None


def test_results_of_other_seeds_differ():
    case = MODELS["gpt6"]()
    with pytest.raises(AssertionError):
        assert_same(of(case, seed=0), of(case, seed=1))


@pytest.mark.parametrize(
    "change",
    [
        lambda r: {"outputs": r.outputs[0]},
        lambda r: {"outputs": (r.outputs[0] + 1e-7, r.outputs[1])},
        lambda r: {"outputs": (r.outputs[0].detach(), r.outputs[1])},
        lambda r: {"outputs": (r.outputs[0].detach().double().requires_grad_(), r.outputs[1])},
        lambda r: {"gradients": {**r.gradients, "spare.bias": torch.zeros(6)}},
        lambda r: {"gradients": {**r.gradients, "body.bias": None}},
        lambda r: {"gradients": {**r.gradients, "body.bias": r.gradients["body.bias"].nextafter(torch.ones(6))}},
        lambda r: {"gradients": {**r.gradients, "body.weight": r.gradients["body.weight"].to_sparse()}},
        lambda r: {"buffers": {"more": torch.ones(1)}},
        lambda r: {"rng_states": [state.roll(1) for state in r.rng_states]},
    ],
)
def test_one_difference_is_found(case, change):
    result = of(case)
    assert_same(result, result._replace())
    with pytest.raises(AssertionError):
        assert_same(result._replace(**change(result)), result)


def test_sparse_gradients_are_compared_coalesced():
    case = MODELS["sparse_embedding"]()
    result = of(case)
    gradient = result.gradients["0.weight"]
    assert gradient.is_sparse
    assert not gradient.is_coalesced()
    changed = {**result.gradients, "0.weight": gradient.coalesce()}
    assert_same(result._replace(gradients=changed), result)
    with pytest.raises(AssertionError):
        assert_same(result._replace(gradients={**changed, "0.weight": gradient * 2}), result)
    with pytest.raises(AssertionError):
        assert_same(result._replace(gradients={**changed, "0.weight": gradient.to_dense()}), result)


def test_modules_without_buffers_or_gradients_are_fine():
    model = nn.Identity()
    result = step(model, (torch.ones(2, requires_grad=True),), torch.sum)
    assert list(result.gradients) == ["inputs[0]"]
    assert result.buffers == {}
