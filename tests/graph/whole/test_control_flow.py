"""Control flow that a tensor decides: as in eager, in the bytes of the branch that takes most."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.graph.eager import compare, measured_peak
from tests.helpers import assert_equal, leaf
from torchckpt import graph
from torchckpt.errors import CaptureError
from torchckpt.graph.private.runtime import is_branching
from torchckpt.graph.step.costs import flops_of

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

A_LOSS_BYTES = 16


class Branches(nn.Module):
    """A wide branch and a narrow one, twice over."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        self.narrow, self.before = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        for _ in range(2):
            x = self.before(x).sin()
            x = torch.cond(x[0, 0] > 0, lambda x: self.wide(x).exp(), lambda x: self.narrow(x).sin(), (x,))
        return x.sum()


@pytest.mark.slow
@pytest.mark.parametrize("share", ["95%", None])
def test_bits_and_bytes_of_both_branches(share):
    torch.manual_seed(0)
    model = Branches()
    options = {} if share is None else {"budget": share}
    inputs = [torch.randn(64, 16) for _ in range(4)]
    step = graph.rematerialize(model, inputs[0], **options)
    measured = []
    for x in inputs:
        compare(model, step, x, loss=lambda loss: loss)
        measured.append(measured_peak(lambda: step(x).backward()))  # noqa: B023
    assert len(set(measured)) > 1
    assert max(measured) <= step.plan.peak_bytes + A_LOSS_BYTES
    always_wide = Branches()
    always_wide.load_state_dict(model.state_dict())
    with torch.no_grad():
        always_wide.before.bias[0] = model.before.bias[0] = 1.5  # the sines of what is near are positive
        always_wide.before.weight[0] = model.before.weight[0] = 0
    widest = measured_peak(lambda: step(inputs[0]).backward())
    assert abs(widest - step.plan.peak_bytes) <= A_LOSS_BYTES


@pytest.mark.slow
def test_flops_are_those_of_the_branch_that_has_most():
    step = graph.rematerialize(Branches(), torch.randn(64, 16))
    (call,) = step._calls.known.values()
    first = next(node for node in call.halves.joint.module.graph.nodes if is_branching(node.target))
    assert flops_of(first) == 2 * 2 * 64 * 16 * 64


def test_branch_that_draws_runs_once():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            h = self.layer(x)
            h = torch.cond(h.sum() > 0, lambda h: torch.dropout(h, 0.5, True), lambda h: h.sin(), (h,))
            return h.tanh().exp()

    model, x = nn.Sequential(Model(), Model()), torch.randn(8, 8)
    step = graph.rematerialize(model, keep=lambda value: "addmm" in value.operator)
    compare(model, step, x)


@pytest.mark.slow
def test_gradient_of_a_function_with_branches():
    def loss_of(x, w):
        return torch.cond(x.sum() > 0, lambda x, w: (x @ w).sin(), lambda x, w: (x @ w).cos(), (x, w)).sum()

    adjoint = graph.gradient(loss_of, torch.ones(2, 4), torch.ones(4, 4))
    for sign in (1, -1):
        x, w = leaf(2, 4), leaf(4, 4)
        with torch.no_grad():
            x.abs_().mul_(sign)
        expected = loss_of(x, w)
        gradients = torch.autograd.grad(expected, [x, w])
        loss, slopes = adjoint(x, w)
        assert_equal((loss, slopes), (expected.detach(), gradients))
        assert_equal(graph.gradients(loss_of, [x, w], checkpoints=None), list(gradients))


def test_loop_of_a_number_of_rounds_that_a_tensor_decides_is_refused():
    from torch._higher_order_ops.while_loop import while_loop

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h.sin()), (torch.tensor(0), self.layer(x)))[1]

    with pytest.raises(CaptureError, match=r"control flow, which depends on tensors[\s\S]*torch.cond"):
        graph.rematerialize(Model(), torch.ones(2, 8))
