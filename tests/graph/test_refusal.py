"""The error of a budget that is too small: every figure is one that can be measured."""
from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tests.graph.allocations import measured_peak
from tests.slow import few
from torchckpt import graph
from torchckpt.errors import BudgetInfeasible
from torchckpt.features import release_of
from torchckpt.planning.budget import written


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))

    def forward(self, x):
        return self.body(x).sum()


def refused(budget, model, x):
    with pytest.raises(BudgetInfeasible) as caught:
        graph.rematerialize(model, x, budget=budget)
    return caught.value


@few(1)
@pytest.mark.parametrize(
    ("budget", "received"),
    [("10%", "10%, which is {tenth}"), ("10kB", "10kB"),
     (10_000, "10000, which is 10kB"), ("10KiB", "10KiB, which is 10.24kB")],
)
def test_what_was_typed_is_repeated(budget, received):
    model, x = Loss(), torch.randn(64, 16, requires_grad=True)
    eager = graph.rematerialize(model, x).plan.eager_peak_bytes + 64
    received = received.format(tenth=written(eager // 10))
    assert f"\n  received: {received}; no schedule needs less than " in str(refused(budget, model, x))


@pytest.mark.usefixtures("gradients_go")
def test_parts_are_those_that_are_measured():
    model, x = Loss(), torch.randn(64, 16, requires_grad=True)
    error = refused("10%", model, x)
    step = graph.rematerialize(model, x, keep=error.plan)
    peak_bytes = measured_peak(lambda: step(x).backward())
    of_parameters = sum(p.grad.nbytes for p in model.parameters())
    state_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), x))
    assert peak_bytes == error.plan.peak_bytes + 4  # the gradient of the loss
    text = str(error)
    assert (
        f"at the end of the step: gradients of parameters {written(of_parameters)}, gradients of inputs "
        f"{written(x.grad.nbytes)}, outputs 4B\n" in text
    )
    assert f"parameters, buffers and inputs, {written(state_bytes)}, are there before" in text
    (at_peak,) = re.findall(r"at the peak of the least: (.*)\n", text)
    (kept,) = re.findall(r"beside that, at that peak, (\S+)kB is kept", text)
    parts = [float(size) for size in re.findall(r"([\d.]+)kB", at_peak)]
    assert sum(parts) + float(kept) == pytest.approx(error.plan.peak_bytes / 1000, abs=0.05)


def test_frozen_parameters_and_inputs_without_a_gradient_are_not_told_of():
    model = Loss().requires_grad_(False)
    model.body[4].requires_grad_(True)
    text = str(refused(1, model, torch.randn(64, 16)))
    outputs = "8B" if release_of(torch.__version__) < (2, 13) else "4B"  # the gradient of the loss stays there, too
    assert f"at the end of the step: gradients of parameters 2.08kB, outputs {outputs}\n" in text
    assert "gradients of inputs" not in text


def test_under_torch_compile():
    model, x = Loss(), torch.randn(64, 16, requires_grad=True)
    call = torch.compile(model, backend=graph.backend("1%", inner="eager"), fullgraph=True, dynamic=False)
    with pytest.raises(BudgetInfeasible, match=r"(?s)received: 1%, which is .*gradients of parameters 23\.08kB, grad"):
        call(x)
