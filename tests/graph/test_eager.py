"""Steps that are equal, and steps that differ in one thing."""
from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from tests.graph.eager import assert_same, step
from tests.models import MODELS


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
