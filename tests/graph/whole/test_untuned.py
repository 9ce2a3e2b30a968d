"""Models that nobody tuned for: as in eager to the bit, in the bytes planned, within the least budget that is named."""
from __future__ import annotations

import pytest
import torch

from tests.graph.eager import assert_same, measured_peak, step
from tests.models.case import itself
from tests.models.untuned import UNTUNED
from tests.slow import few
from torchckpt import graph
from torchckpt.errors import BudgetInfeasible
from torchckpt.features import release_of

A_LOSS_BYTES = 16

MORE_THAN_TAKEN = {"Normed": 6500}
"""Bytes that are planned beside those that are taken: a kernel takes most on numbers that are not those of the call."""

OPTIONS = [pytest.param({}, marks=pytest.mark.slow), {"budget": "60%"}]


pytestmark = pytest.mark.usefixtures("quick_planner", "one_thread")


BEYOND_2_11 = {"StateSpace": "cumprod is traced in other operations", "Sorted": "quantile is not traced"}


LONG = ("Recurrent", "EncoderDecoder", "Decomposed", "Cells", "Flow", "Attentions", "Capsules", "Einsums",
    "Activations", "Experts", "Norms", "Resampled", "Twins", "Checkpointed", "Penalty", "Aligned", "Pools", "Sampled",
    "Distances", "Special", "Cut", "ChannelsLast", "Functional", "OtherDimensions", "BagsOnly",
    "Splines", "Hyper", "Convolutions", "Wave")
"""Of hundreds of operations, or alike: others here, or tests of single layers, have most of what they have."""


def marks_of(name):
    is_old = release_of(torch.__version__) == (2, 11)
    fails = BEYOND_2_11.get(name)
    marks = [pytest.mark.skipif(is_old, reason=f"torch 2.11 alone: {fails}")] if fails else []
    return [*marks, pytest.mark.slow] if name in LONG else marks


def within(model, inputs, options):
    """Rematerialized, within the least budget that there is where it is refused."""
    try:
        return graph.rematerialize(model, *inputs, **options)
    except BudgetInfeasible as error:
        return graph.rematerialize(model, *inputs, budget=error.least_bytes)


@few(1)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning")
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in UNTUNED])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bits_and_bytes(name, options):
    model, inputs = UNTUNED[name]()
    rematerialized = within(model, inputs, options)
    expected = step(model, inputs, itself)
    assert_same(step(model, inputs, itself, call=rematerialized), expected)
    measured = measured_peak(lambda: rematerialized(*inputs).backward())
    plan = rematerialized.plan
    assert measured - A_LOSS_BYTES <= plan.peak_bytes <= measured + MORE_THAN_TAKEN.get(name, A_LOSS_BYTES)
    assert plan.budget_bytes is None or measured <= plan.budget_bytes
