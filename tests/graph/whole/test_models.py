"""Whole models, small: as in eager to the bit, with the bytes that the plan says, within the budget that was given."""
from __future__ import annotations

import math

import pytest
from torch import nn

from tests.graph.eager import assert_same, measured_peak, step
from tests.models import MODELS
from tests.slow import few, rarely, slow
from torchckpt import graph
from torchckpt.errors import ArgumentError, BudgetInfeasible

SIZES = {
    "gpt2_hf": {"layers": 1, "length": 16, "batch": 4},
    "gpt6": {"layers": 2, "length": 24, "batch": 4},
    "gpt6_without_dropout": {"layers": 2, "length": 24, "batch": 4},
    "llama_hf": {"layers": 1, "length": 16, "batch": 4},
    "lstm50": {"steps": 4, "batch": 16},
    "mlp24": {"layers": 10, "batch": 64},
    "moe": {"tokens": 48},
    "nested_outputs": {"batch": 64},
    "resnet20": {"depth": 8, "batch": 8},
    "sparse_embedding": {"batch": 64},
    "tanh_chain": {"nodes": 30, "elements": 1000},
    "tanh_chain_residual": {"nodes": 30, "elements": 1000},
    "unet": {"side": 16, "batch": 4, "levels": 1},
}
"""Activations take more than weights do, and a step has tens of operations."""

NAMES = {
    "gpt2_hf": ["attn", "mlp"],
    "gpt6": ["model.blocks.*.attend"],
    "gpt6_without_dropout": ["model.blocks.1", "model.head"],
    "llama_hf": ["mlp"],
    "lstm50": ["model.cell"],
    "mlp24": ["model.3", "model.7", "model.11", "model.15"],
    "moe": ["model.layers.*.router"],
    "nested_outputs": ["model.body"],
    "resnet20": ["*.body.3"],
    "sparse_embedding": ["model.4"],
    "unet": ["model.down.0", "model.bottom"],
}
"""Without the chains, which have no modules."""

SHARES = {
    "gpt2_hf": (0.75, 0.6),
    "gpt6": (0.9, 0.75, 0.6, 0.5),
    "gpt6_without_dropout": (0.6,),
    "llama_hf": (0.75, 0.6),
    "lstm50": (0.9, 0.75),
    "mlp24": (0.9, 0.75, 0.6, 0.5),
    "moe": (0.75,),
    "resnet20": (0.9,),
    "tanh_chain": (0.9, 0.75, 0.6, 0.5, 0.4, 0.25),
    "tanh_chain_residual": (0.6, 0.4, 0.25),
    "unet": (0.9, 0.75, 0.6),
}
"""Shares of eager's peak that are enough. Two models have none: what their steps cannot do without is almost all."""


LIKE_OTHERS = ("gpt6_without_dropout", "llama_hf", "tanh_chain_residual")
"""Of these, no share is in the short run: gpt6, gpt2_hf and tanh_chain are like them."""


def shares(name):
    """The least is in the short run, but of those that others are like."""
    for share in SHARES[name]:
        is_slow = name in LIKE_OTHERS or share > min(SHARES[name])
        yield pytest.param(name, share, marks=pytest.mark.slow if is_slow else ())


ALIKE = ("gpt6_without_dropout", "llama_hf")
ALIKE_BY_NAME = (*ALIKE, "gpt2_hf", "lstm50", "mlp24", "sparse_embedding")
"""Beside gpt6 and gpt2_hf. All that these keep by default, by name or for speed is slow; the last is in the test of a
loss outside."""


def each(names, alike=ALIKE):
    """A test of each; those that others are like are slow."""
    return pytest.mark.parametrize("name", rarely(alike, names))

LARGE = {"gpt24": {"layers": 12}, "resnet110": {"depth": 38}, "resnet200": {}}
"""Of these one is as deep as its name says."""

TWO_SCALARS_BYTES = 16
"""The loss and its gradient are alive beside a step."""


class WithLoss(nn.Module):
    """A model that returns its loss: all that a step allocates is then in the traced graph."""

    def __init__(self, case) -> None:
        super().__init__()
        self.model, self.loss = case.model, case.loss

    def forward(self, *inputs):
        return self.loss(self.model(*inputs))


def build(name):
    if name.endswith("_hf"):
        pytest.importorskip("transformers")
    return MODELS[name](**{**SIZES, **LARGE}[name])


def itself(loss):
    return loss


def checked(case, **options):
    """The plan of the step with its loss, once outputs, gradients, buffers, random numbers and bytes were compared."""
    model, inputs = WithLoss(case), case.inputs
    expected = step(model, inputs, itself)
    rematerialized = graph.rematerialize(model, *inputs, **options)
    assert_same(step(model, inputs, itself, call=rematerialized), expected)
    inputs = case.make_inputs(0)
    measured = measured_peak(lambda: rematerialized(*inputs).backward())
    plan = rematerialized.plan
    assert abs(measured - plan.peak_bytes) <= max(TWO_SCALARS_BYTES, plan.peak_bytes // 1000)
    assert plan.budget_bytes is None or measured <= plan.budget_bytes
    return plan


pytestmark = pytest.mark.usefixtures("quick_planner", "one_thread")


def test_every_model_is_here():
    assert {*SIZES, *LARGE} == set(MODELS)


# the same to the bit, and to the byte ---------------------------------------------------------------------------------


@few(1)
@each(SIZES, (*ALIKE, "gpt2_hf", "gpt6", "mlp24", "resnet20", "tanh_chain_residual"))
def test_all_is_kept_by_default(name):
    plan = checked(build(name))
    assert plan.recomputed == ()
    assert plan.peak_bytes == plan.eager_peak_bytes


@few(1)
@each(SIZES, (*ALIKE, "moe", "lstm50", "tanh_chain_residual", "unet"))
def test_loss_outside_of_the_model(name):
    """The outputs too are those of eager, nested as they are, each with a gradient or without."""
    case = build(name)
    rematerialized = graph.rematerialize(case.model, *case.inputs, keep=None if "tanh" in name else "speed")
    expected = step(case.model, case.inputs, case.loss)
    assert_same(step(case.model, case.inputs, case.loss, call=rematerialized), expected)


@few(1)
@each(sorted({*SIZES} - {"tanh_chain", "tanh_chain_residual"}), ALIKE_BY_NAME)
def test_speed(name):
    plan = checked(build(name), keep="speed")
    assert plan.recompute_flops == 0
    assert plan.peak_bytes <= plan.eager_peak_bytes


def test_speed_needs_a_product():
    with pytest.raises(ArgumentError, match=r'(?s)selects no value.*keep="speed", but there is no conv'):
        checked(build("tanh_chain"), keep="speed")


@few(1)
@each(SIZES, (*ALIKE, "gpt6", "lstm50", "resnet20", "sparse_embedding", "tanh_chain"))
def test_memory(name):
    plan = checked(build(name), keep="memory")
    assert plan.peak_bytes <= plan.eager_peak_bytes


@few(1)
@each(NAMES, ALIKE_BY_NAME)
def test_names(name):
    plan = checked(build(name), keep=NAMES[name])
    assert plan.peak_bytes <= plan.eager_peak_bytes


@few(1)
@pytest.mark.parametrize(("name", "share"), [case for name in SHARES for case in shares(name)])
def test_budget(name, share):
    plan = checked(build(name), budget=f"{share:.0%}")
    assert math.floor(share * plan.eager_peak_bytes) <= plan.budget_bytes < share * (plan.eager_peak_bytes + 100)
    assert plan.recomputed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt6", *slow(["unet"])])
def test_budget_in_bytes(name):
    eager_peak_bytes = graph.rematerialize(WithLoss(case := build(name)), *case.inputs).plan.eager_peak_bytes
    plan = checked(case, budget=eager_peak_bytes * 3 // 4)
    assert plan.budget_bytes == eager_peak_bytes * 3 // 4


@pytest.mark.parametrize("name", ["unet", *slow(["gpt6", "mlp24"])])
def test_names_within_a_budget(name):
    plan = checked(build(name), keep=NAMES[name], budget="90%")
    kept = {plan.flow.writer[storage] for match in NAMES[name] for storage in plan.names.get(match, ())}
    assert not kept & set(plan.schedule[len(plan.flow.operations):])


# what cannot be -------------------------------------------------------------------------------------------------------


@few(1)
@pytest.mark.parametrize("name", ["nested_outputs", "sparse_embedding", *slow(["mlp24", "unet"])])
def test_budget_that_is_too_small_has_the_least_that_is_not(name):
    """The error has the least bytes found and a plan of them; with the bytes it asks for, there is one."""
    case = build(name)
    with pytest.raises(BudgetInfeasible, match=r"works:    budget=") as caught:
        graph.rematerialize(WithLoss(case), *case.inputs, budget="10%")
    least = caught.value
    assert least.least_bytes == least.plan.peak_bytes + 64
    assert least.plan.lower_bound + 64 <= least.least_bytes <= least.plan.eager_peak_bytes + 64
    assert least.plan.budget_bytes < least.least_bytes
    plan = checked(case, budget=least.least_bytes)
    assert plan.peak_bytes <= least.least_bytes


@pytest.mark.slow
def test_plan_of_the_error_runs():
    case = build("unet")
    with pytest.raises(BudgetInfeasible) as caught:
        graph.rematerialize(WithLoss(case), *case.inputs, budget="30%")
    plan = checked(case, keep=caught.value.plan)
    assert plan.schedule == caught.value.plan.schedule


# large ones -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_memory_of_a_deep_model(name):
    plan = checked(build(name), keep="memory")
    assert plan.peak_bytes < 0.7 * plan.eager_peak_bytes
