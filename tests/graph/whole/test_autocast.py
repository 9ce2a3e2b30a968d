"""Autocast: casts, and sums of gradients, as in eager, to the bit."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.graph.eager import compare, measured_peak
from tests.graph.traced import Function
from tests.helpers import assert_equal, leaf
from tests.slow import few
from torchckpt import graph
from torchckpt.features import release_of


def autocast(**options):
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


class Twice(nn.Module):
    """Its weight is cast once, and its gradients are added in the dtype of the cast."""

    def __init__(self, inside=False):
        super().__init__()
        self.layer, self.inside = nn.Linear(16, 16), inside

    def forward(self, x):
        if self.inside:
            with autocast():
                return self.layer(self.layer(x).tanh()).float()
        return self.layer(self.layer(x).tanh()).float()


class Exact(nn.Module):
    """A part in float32 inside, whose backward is in float32 too."""

    def __init__(self):
        super().__init__()
        self.first, self.exact = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = self.exact(x.float()).tanh()
        return self.first(x).float()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.project(x).view(1, -1, 3, 4, 4).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True).float()


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer(16, 16)

    def forward(self, x):
        return self.layer(x)[0].float()


MODELS = {
    "twice": Twice, "twice inside": lambda: Twice(True), "exact": Exact, "attention": Attention,
    "RNN": lambda: Recurrent(nn.RNN), "GRU": lambda: Recurrent(nn.GRU), "LSTM": lambda: Recurrent(nn.LSTM),
}

OLD_LSTM = pytest.mark.skipif(
    release_of(torch.__version__) < (2, 13), reason="torch before 2.13: gradients of an LSTM are traced as bfloat16"
)


def has_lstm():
    """Whether oneDNN has an LSTM in bfloat16 for this processor: plain PyTorch raises where it has not."""
    try:
        with torch.no_grad(), autocast():
            nn.LSTM(16, 16)(torch.zeros(3, 16))
    except RuntimeError:
        return False
    return True


NO_LSTM = pytest.mark.skipif(not has_lstm(), reason="this processor has no LSTM in bfloat16")
MARKS = {"LSTM": [OLD_LSTM, NO_LSTM], "GRU": pytest.mark.slow}  # a GRU is traced as an RNN is


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, [])) for name in MODELS])
def model(request):
    return MODELS[request.param]()


def step_of(model, call, x, cache=True):
    torch.manual_seed(1)
    model.zero_grad()
    with autocast(cache_enabled=cache):
        loss = call(x).sin().sum()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@few(1)
@pytest.mark.parametrize("cache", [True, False])
def test_autocast_around(model, cache):
    x = torch.randn(8, 16)
    step = graph.rematerialize(model)
    for _ in range(2):
        assert_equal(step_of(model, step, x, cache), step_of(model, model, x, cache))


def test_cache_on_and_off_are_two_traces(traces):
    model, x = Twice(), torch.randn(8, 16)
    step = graph.rematerialize(model)
    for cache in (True, False, True):
        assert_equal(step_of(model, step, x, cache), step_of(model, model, x, cache))
    assert len(traces) == 2


def test_autocast_inside_alone():
    model = Twice(inside=True)
    compare(model, graph.rematerialize(model), torch.randn(8, 16))


@few(1)
@pytest.mark.usefixtures("fresh_dynamo")
def test_backend_that_runs_operations_as_they_are(model):
    if "Recurrent" in type(model).__name__:
        pytest.skip("Dynamo does not trace recurrent layers")
    x = torch.randn(8, 16)
    compiled = torch.compile(model, backend=graph.backend(inner="eager"), fullgraph=True, dynamic=False)
    assert_equal(step_of(model, compiled, x), step_of(model, model, x))


@few(1)
def test_gradients_of_a_function(model):
    def loss_of(x):
        return model(x).sin().sum()

    names = [f"layer.{name}" for name, _ in model.named_parameters()]
    x = torch.randn(3, 16)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = model

        def forward(self, x):
            return self.layer(x).sin().sum()

    expected = step_of(model, model, x)
    with autocast():
        adjoint = graph.gradient(Loss(), x, require_grads=names)
        torch.manual_seed(1)
        loss, gradients = adjoint(x)
    assert_equal([loss, *gradients], expected)
    torch.manual_seed(1)
    loss, gradients = adjoint(x)  # its casts are in it
    assert_equal([loss, *gradients], expected)

    wanted = leaf(3, 16)
    torch.manual_seed(1)
    with autocast():
        loss = loss_of(wanted)
    (expected,) = torch.autograd.grad(loss, wanted)
    torch.manual_seed(1)
    with autocast():
        gradients = graph.gradients(loss_of, wanted, checkpoints=None)
        assert not isinstance(model(wanted), torch._subclasses.FakeTensor)  # no cast without data is left
    assert_equal(gradients, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_leaf_that_requires_a_gradient_is_cast_once_and_another_tensor_each_time():
    function = Function(lambda x, w: ((x @ w).tanh() @ w).float())
    step = graph.rematerialize(function)
    weight = leaf(16, 16)
    for make in (lambda: weight, lambda: weight * 1):
        results = []
        for call in (function, step):
            with autocast():
                loss = call(torch.ones(4, 16), make()).sin().sum()
            results.append(torch.autograd.grad(loss, weight))
        assert_equal(results[1], results[0])


@pytest.mark.parametrize("around", [True, False])
def test_backward_inside_an_autocast_is_as_outside(around):
    model, x = Exact(), torch.randn(8, 16)
    with autocast(enabled=around):
        expected = model(x).sin().sum()
        received = graph.rematerialize(model)(x).sin().sum()
    expected = torch.autograd.grad(expected, list(model.parameters()))
    with autocast():
        received = torch.autograd.grad(received, list(model.parameters()))
    assert_equal(received, expected)


@pytest.mark.usefixtures("gradients_go")
def test_bytes_of_exact_parts_are_planned():
    """Operations are measured without casts, too."""
    model, x = nn.Sequential(*(Exact() for _ in range(3))), torch.randn(64, 16)
    with autocast():
        step = graph.rematerialize(model, x, keep="speed")

    def run():
        with autocast():
            outputs = step(x)
        outputs.backward(outputs.detach())

    assert abs(measured_peak(run) - step.plan.peak_bytes) <= 16
