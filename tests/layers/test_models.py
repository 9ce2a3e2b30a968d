"""Models of the benchmarks, with dropout and batch norms: bytes and bits within budgets."""
from __future__ import annotations

import copy

import pytest
import torch

import torchckpt
from benchmarks.layers.ways import layers_of
from tests.graph.allocations import measured_peak, workspace_bytes
from tests.models import MODELS
from tests.slow import few, slow
from torchckpt.layers.took import Took
from torchckpt.testing import peak_bytes

SIZES = {
    "gpt6": {"layers": 4, "width": 32, "heads": 2, "length": 32, "words": 17, "batch": 8},
    "resnet20": {"depth": 14, "width": 8, "side": 16, "batch": 16},
    "unet": {"levels": 3, "width": 8, "side": 32, "batch": 4},
}
KERNELS = ("aten::convolution", "aten::convolution_backward")


@pytest.fixture(params=SIZES)
def case(request):
    return MODELS[request.param](**SIZES[request.param])


def step_of(case, model):
    def run():
        torch.manual_seed(1)
        model.zero_grad()
        case.loss(model(*case.inputs)).backward()

    return run


@few(1)
@pytest.mark.parametrize("share", [10, *slow([30, 50, 70]), 90])
def test_bytes_are_those_that_are_planned_and_within_the_budget(case, share):
    plain, model = copy.deepcopy(case.model), case.model
    run, run_plain = step_of(case, model), step_of(case, plain)
    names = layers_of(model)
    with torchckpt.checkpoint_layers(model, names, budget="1TiB") as handle:
        run(), run()
        least, most = handle.plan.everything_recomputed_bytes, handle.plan.everything_kept_bytes
    with torchckpt.checkpoint_layers(model, names, budget=int(least + (most - least) * share / 100)) as handle:
        for _ in range(4):
            run()
        taken, allocated, plan = peak_bytes(run, "cpu"), measured_peak(run), handle.plan
        for _ in range(8):
            run_plain()  # as often, for the buffers of norms
        tensors = [*plain.parameters(), *plain.buffers()], [*model.parameters(), *model.buffers()]
        assert all(torch.equal(one, other) for one, other in zip(*tensors))
        assert all(torch.equal(one.grad, other.grad) for one, other in zip(plain.parameters(), model.parameters()))
    assert taken <= plan.budget_bytes
    assert taken == pytest.approx(plan.peak_bytes, rel=0.02)
    assert plan.measured_peak_bytes == pytest.approx(plan.peak_bytes, rel=0.02)
    assert allocated <= plan.budget_bytes + workspace_bytes(run, KERNELS)


@few(1)
@pytest.mark.parametrize("share", [85, 95])
def test_no_choice_of_every_kth_layer_that_fits_recomputes_for_less_time(case, share):
    """By the seconds and bytes that the plan is made of."""
    with torchckpt.checkpoint_layers(case.model, layers_of(case.model), budget=f"{share}%") as handle:
        for _ in range(2):
            step_of(case, case.model)()
        plan = handle.plan
    calls, took = range(len(plan.took.calls)), plan.took
    assert isinstance(took, Took)
    for every in calls:
        kept = frozenset(calls) - frozenset(calls[:: every + 1])
        if took.peak_bytes(kept) <= plan.budget_bytes:
            assert plan.recompute_seconds <= sum(took.calls[at].replay_seconds for at in calls if at not in kept)
