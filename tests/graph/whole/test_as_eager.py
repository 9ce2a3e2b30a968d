"""What is traced does what eager does, to the bit and to the byte, where torch would trace something else."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.graph.eager import compare, measured_peak
from tests.graph.traced import Function, joint_of
from tests.helpers import assert_equal, leaf
from tests.slow import few, rarely, slow
from torchckpt import graph
from torchckpt.errors import BudgetInfeasible
from torchckpt.graph.private.surroundings import eager_kernels

POLICIES = [{}, {"keep": "memory"}]


class First(nn.Module):
    """The first output of a module."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


RECURRENT = {
    "LSTM": lambda: nn.LSTM(8, 16, 2),
    "LSTM with a dropout": lambda: nn.LSTM(8, 16, 2, dropout=0.3),
    "LSTM in both directions": lambda: nn.LSTM(8, 16, 2, bidirectional=True, batch_first=True),
    "LSTM without biases": lambda: nn.LSTM(8, 16, bias=False),
    "RNN": lambda: nn.RNN(8, 16, 2),
    "RNN with a dropout": lambda: nn.RNN(8, 16, 2, dropout=0.3, nonlinearity="relu"),
}


@few(1)
@pytest.mark.parametrize("options", POLICIES, ids=str)
@pytest.mark.parametrize("requires_grad", [True, *slow([False])])
@pytest.mark.parametrize("name", rarely(["RNN", "LSTM"], RECURRENT))
def test_recurrent_layers(name, requires_grad, options):
    """A fused LSTM's backward reads a workspace, which there is where gradients are recorded alone."""
    net, x = First(RECURRENT[name]()), torch.randn(3, 5, 8, requires_grad=requires_grad)
    step = graph.rematerialize(net, x, **options)
    compare(net, step, x)
    compare(net, step, x)


def test_fused_lstm_is_one_operation_and_its_workspace_is_seen():
    joint = joint_of(First(nn.LSTM(8, 16)), leaf(3, 5, 8))
    (place,) = (place for place, operation in enumerate(joint.flow.operations) if operation.name == "mkldnn_rnn_layer")
    sizes = [joint.flow.sizes_bytes[storage] for storage in joint.flow.operations[place].writes]
    assert sizes[:3] == [3 * 5 * 16 * 4, 5 * 16 * 4, 5 * 16 * 4]
    assert sizes[3] > 0


UPSAMPLINGS = ["nearest", "nearest-exact", "bilinear", "bicubic", "area"]


@few(1)
@pytest.mark.parametrize(
    ("mode", "options"), [pytest.param(mode, options, marks=pytest.mark.slow if (at + number) % 2 else ())
    for at, mode in enumerate(UPSAMPLINGS) for number, options in enumerate(POLICIES)], ids=str,
)  # fmt: skip
def test_upsampling(mode, options):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Upsample(size=(15, 17), mode=mode), nn.Conv2d(4, 4, 3))
    x = torch.randn(2, 3, 10, 10, requires_grad=True)
    compare(net, graph.rematerialize(net, x, **options), x)


def test_bilinear_upsampling_is_one_operation():
    joint = joint_of(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), leaf(1, 2, 4, 4))
    assert [operation.name for operation in joint.flow.operations] == [
        "upsample_bilinear2d", "tangents", "upsample_bilinear2d_backward"
    ]


def test_formulas_are_there_again_after_a_trace():
    operator = torch.ops.aten.upsample_bilinear2d.default
    before = dict(operator.py_kernels)
    with eager_kernels():
        assert set(operator.py_kernels) < set(before)
    assert operator.py_kernels == before
    with pytest.raises(RuntimeError, match="once"), eager_kernels():
        raise RuntimeError("once")
    assert operator.py_kernels == before


def test_loss_of_many_labels():
    """torch's formula in Python takes what comes after the first -1 for labels."""
    net, x = nn.Linear(6, 6), torch.randn(2, 6)
    net.forward = lambda x, labels: F.multilabel_margin_loss(nn.Linear.forward(net, x), labels)
    labels = torch.tensor([[3, 0, -1, 1, 2, 4], [1, -1, 0, 0, 0, 0]])
    compare(net, graph.rematerialize(net, x, labels), x, labels, loss=lambda loss: loss)


@few(1)
@pytest.mark.parametrize("activation", [nn.Softshrink(), nn.Hardshrink(), nn.Hardtanh(), nn.LogSigmoid(), nn.Mish()])
def test_activations(activation):
    net, x = nn.Sequential(nn.Linear(9, 9), activation, nn.Linear(9, 9)), leaf(5, 9)
    compare(net, graph.rematerialize(net, x, keep="memory"), x)


@few(1)
@pytest.mark.parametrize("probability", [0.0, 0.15, 1.0])
@pytest.mark.parametrize("options", [*POLICIES, {"rng": "replay", "keep": "memory"}], ids=str)
def test_dropout_of_any_share(probability, options):
    """One that drops all draws nothing, in eager: compare() looks at the generator."""
    net, x = nn.Sequential(nn.Linear(9, 9), nn.Dropout(probability), nn.Linear(9, 9)), leaf(5, 9)
    compare(net, graph.rematerialize(net, x, **options), x)


# bytes ----------------------------------------------------------------------------------------------------------------


def peaks(net, *inputs, **options):
    """What the plan says, and what is measured; the loss's gradient is there before."""
    step = graph.rematerialize(net, *inputs, **options)

    def run():
        step(*inputs).backward()

    run()
    net.zero_grad()
    return step.plan.peak_bytes, measured_peak(run)


class Handed(torch.autograd.Function):
    """A loss whose gradients are made in its backward."""

    @staticmethod
    def forward(ctx, *outputs):
        ctx.shapes = [output.shape for output in outputs]
        return torch.zeros(())

    @staticmethod
    def backward(ctx, _):
        return tuple(map(torch.ones, ctx.shapes))


def test_gradients_are_there_when_the_backward_begins():
    """It could make much of saved values before it reads one of them."""
    net, x, w = Function(lambda x, w: (x * x, torch.sinc(F.celu(w + w)).erf() + w)), leaf(100), leaf(1000)
    with pytest.raises(BudgetInfeasible) as least:
        graph.rematerialize(net, x, w, budget=1)
    step = graph.rematerialize(net, x, w, budget=least.value.least_bytes)

    def run():
        outputs = step(x, w)
        Handed.apply(*outputs).backward()

    run()
    x.grad = w.grad = None
    assert measured_peak(run) - 8 <= step.plan.peak_bytes <= least.value.least_bytes


def test_gradients_that_nothing_reads_die_when_they_arrive():
    """That of the sign of another number is zero, whatever arrives."""
    net, x = Function(lambda x: torch.ones_like(x).copysign(x)), leaf(1000)
    step = graph.rematerialize(net, x)

    def run():
        outputs = [step(x)]
        Handed.apply(*outputs).backward()

    run()
    x.grad = None
    assert measured_peak(run) - 8 <= step.plan.peak_bytes


LOSSES = [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits]


class Loss(nn.Linear):
    def __init__(self, loss):
        super().__init__(100, 100)
        self.loss = loss

    def forward(self, x, target):
        return self.loss(super().forward(x), target)


@few(1)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_that_return_a_scalar_in_what_they_reduced(loss):
    planned, measured = peaks(Loss(loss), torch.randn(50, 100), torch.rand(50, 100))
    assert measured - 8 <= planned <= measured


class Mixed(nn.Module):
    """Data in half of the precision of its norms, as under autocast on a CPU."""

    def __init__(self):
        super().__init__()
        self.rise, self.norm = nn.Linear(64, 64, dtype=torch.bfloat16), nn.LayerNorm(64)
        self.fall, self.groups = nn.Linear(64, 64, dtype=torch.bfloat16), nn.GroupNorm(4, 64)

    def forward(self, x):
        for _ in range(3):
            x = self.fall(self.norm(self.rise(x)).sin())
        return self.groups(x).sin().sum()


@few(1)
@pytest.mark.parametrize("options", POLICIES, ids=str)
def test_norms_of_more_precise_weights(options):
    planned, measured = peaks(Mixed(), torch.randn(400, 64, dtype=torch.bfloat16), **options)
    assert measured - 8 <= planned <= measured


@few(1)
@pytest.mark.parametrize("layers", [1, 2])
def test_recurrent_layers_have_a_workspace_in_their_backward_too(layers):
    net = nn.Sequential(First(nn.LSTM(64, 256, layers)), Function(torch.sum))
    planned, measured = peaks(net, torch.randn(50, 16, 64))
    copied = 4 * 256 * 4  # both biases have one gradient, which autograd copies for the second
    assert measured - copied - 8 <= planned <= measured


# strides --------------------------------------------------------------------------------------------------------------


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.rise, self.norm, self.fall = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x):
        return self.fall(self.norm(self.rise(x).transpose(1, 2)).transpose(1, 2)).view(-1)


@few(1)
@pytest.mark.parametrize("options", POLICIES, ids=str)
def test_view_after_a_batch_norm_of_what_has_gaps(options):
    net, x = Turned(), torch.randn(4, 5, 6)
    compare(net, graph.rematerialize(net, x, **options), x)


# operators of the user's ----------------------------------------------------------------------------------------------


@torch.library.custom_op("torchckpt_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Draws, and does not carry the tag that says so."""
    return x * torch.rand_like(x)


noisy.register_fake(torch.empty_like)
noisy.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def test_operator_that_draws_runs_once():
    net, x = nn.Sequential(nn.Linear(4, 4), Function(noisy), nn.Linear(4, 4)), leaf(3, 4)
    step = graph.rematerialize(net, x, keep=lambda value: value.flops > 0)
    assert [operation.repeatable for operation in step.plan.flow.operations if "noisy" in operation.name] == [False]
    compare(net, step, x)


@torch.library.custom_op("torchckpt_tests::picky", mutates_args=())
def picky(x: torch.Tensor) -> torch.Tensor:
    if (x >= 0).all():
        raise KeyError("made-up numbers")
    return x.sin()


picky.register_fake(torch.empty_like)
picky.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def test_operator_that_raises_on_numbers_that_are_made_up():
    net, x = nn.Sequential(nn.Linear(4, 4), Function(picky)), -torch.ones(3, 4)
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(4))
        net[0].bias.zero_()
    with pytest.warns(UserWarning, match="cannot be measured"):
        step = graph.rematerialize(net, x, keep="memory")
    assert_equal(step(x), net(x))
