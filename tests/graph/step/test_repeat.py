"""What runs in an operation's place when it is repeated: the same bits."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from tests.graph.traced import joint_of
from tests.helpers import assert_equal, leaf
from tests.slow import few, slow, slow_but
from torchckpt import graph
from torchckpt.errors import CaptureError
from torchckpt.graph.step.repeat import forget_statistics, outputs_of, repeat_of, runs_once
from torchckpt.planning.remat.flow.late import late

aten = torch.ops.aten


def call(target, *args):
    graph = fx.Graph()
    x = graph.placeholder("x")
    return graph.call_function(target, (x, *args))


@pytest.mark.parametrize(
    ("node", "once"),
    [
        (call(aten.sin.default), False),
        (call(aten.native_dropout.default, 0.5, True), True),
        (call(aten.native_dropout.default, 0.5, None), True),
        (call(aten.native_dropout.default, 0.5, False), False),
        (call(aten.bernoulli.default), True),
        (call(aten.rand_like.default), True),
        (call(aten.add_.Tensor, 1), True),
        (call(aten._scaled_dot_product_flash_attention_for_cpu.default, None, None), False),
    ],
    ids=lambda value: str(value.target) if isinstance(value, fx.Node) else str(value),
)
def test_runs_once(node, once):
    assert runs_once(node) == once


def test_nothing_takes_the_place_of_a_plain_operation_or_a_draw():
    assert repeat_of(call(aten.sin.default)) is None
    assert repeat_of(call(aten.bernoulli.default)) is None
    assert repeat_of(call(aten.native_dropout.default, 0.5, False)) is None


def test_outputs_by_their_places():
    joint = joint_of(lambda x: nn.functional.dropout(x, 0.5).sum(), leaf(3))
    (dropout,) = joint.module.graph.find_nodes(op="call_function", target=aten.native_dropout.default)
    assert {place: node.name for place, node in outputs_of(dropout).items()} == {0: "getitem", 1: "getitem_1"}
    assert outputs_of(call(aten.sin.default)) == {}


def test_backward_of_a_training_norm_reads_no_running_statistics():
    drawn = fx.Graph()
    data = drawn.placeholder("x")
    for training in (True, False):
        args = (data, data, data, data, data, data, data, training, 1e-5, [True] * 3)
        drawn.call_function(aten.native_batch_norm_backward.default, args)
    forget_statistics(drawn)
    train, evaluate = drawn.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default)
    assert train.args[3:5] == (None, None)
    assert evaluate.args[3:5] == (data, data)


# the same bits --------------------------------------------------------------------------------------------------------


def same(model, x, dtype=torch.float32):
    """All that can be is recomputed; eager's bits, buffers and random numbers."""
    model, x = model.to(dtype).train(), x.to(dtype)
    plan = graph.rematerialize(model, x).plan
    step = graph.rematerialize(model, x, keep=replace(plan, schedule=tuple(late(plan.flow, set()))))
    buffers = [buffer.clone() for buffer in model.buffers()]
    results = []
    for call in (model, step):
        torch.manual_seed(1)
        for buffer, before in zip(model.buffers(), buffers):
            buffer.copy_(before)
        model.zero_grad()
        outputs = call(x)
        outputs.sin().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append((outputs, gradients, [buffer.clone() for buffer in model.buffers()], torch.get_rng_state()))
    assert_equal(results[1], results[0])
    return step.plan


def between(module, width=16):
    return nn.Sequential(nn.Linear(width, width), module, nn.GELU(), nn.Linear(width, width))


SHARES, DTYPES = (0.1, 0.15, 0.3, 0.5, 0.97), (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ROUNDED = {*((0.15, dtype) for dtype in DTYPES), *((p, torch.bfloat16) for p in SHARES)}


@few(1)
@pytest.mark.parametrize(("p", "dtype"), slow_but(ROUNDED, [(p, dtype) for p in SHARES for dtype in DTYPES]))
def test_dropout(p, dtype):
    """Eager's scale is rounded to the dtype before it is used: in half precision, and for 0.15 in single."""
    plan = same(between(nn.Dropout(p)), torch.randn(64, 16), dtype)
    assert "gelu" in plan.recomputed


def test_dropout_of_nothing():
    same(between(nn.Dropout(0.0)), torch.randn(64, 16))


def test_dropout_is_repeated_without_a_draw():
    plan = same(between(nn.Dropout(0.1)), torch.randn(64, 16))
    assert "native_dropout" in plan.recomputed
    assert "native_dropout" in plan.saved  # its mask


def test_every_probability_in_single_precision():
    """There are some of which the reciprocal in double precision rounds to another number."""

    class Each(nn.Linear):
        def forward(self, x):
            h = super().forward(x)
            return torch.cat([nn.functional.dropout(h, percent / 100) for percent in range(1, 100, 7)])

    same(Each(4, 4), torch.randn(8, 4))


@few(1)
@pytest.mark.parametrize("dtype", [*slow([torch.float32, torch.float64]), torch.bfloat16])
@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(16), nn.BatchNorm1d(16, affine=False), nn.BatchNorm1d(16, track_running_stats=False),
        nn.LayerNorm(16), nn.GroupNorm(4, 16),
    ],
    ids=["batch", "without weights", "without statistics", "layer", "group"],
)
def test_norms(norm, dtype):
    """Recomputed, and running statistics counted once."""
    plan = same(between(norm), torch.randn(64, 16), dtype)
    assert plan.recomputed


class Transposed(nn.Module):
    """A norm of what lies another way."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.unflatten(0, (8, 8)).mT).mT.flatten(0, 1)


@few(1)
@pytest.mark.parametrize("dtype", [torch.float32, *slow([torch.float64])])
@pytest.mark.parametrize("around", [lambda norm: norm, Transposed])
def test_norm_with_weights_that_round(around, dtype):
    norm = nn.BatchNorm1d(16)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    plan = same(between(around(norm)), torch.randn(64, 16), dtype)
    assert "native_batch_norm" in "".join(plan.recomputed)


def test_norm_in_evaluation_is_repeated_as_it_is():
    norm = nn.BatchNorm1d(16)
    norm.running_mean.normal_()
    model = between(norm)
    same(model, torch.randn(64, 16))
    model.eval()
    step, x = graph.rematerialize(model, keep="speed"), torch.randn(64, 16)
    weight = model[0].weight
    assert_equal(*(torch.autograd.grad(call(x).sum(), weight) for call in (step, model)))


def test_norm_that_asks_for_its_count_is_named():
    with pytest.raises(CaptureError, match=r"batchnorm\.py:\d+: \"exponential_average_factor"):
        graph.rematerialize(nn.BatchNorm1d(4, momentum=None), leaf(3, 4))


@few(1)
@pytest.mark.parametrize("function", [nn.functional.rrelu, nn.functional.dropout1d, nn.functional.alpha_dropout])
def test_other_draws_are_kept(function):
    class Drawn(nn.Module):
        def forward(self, x):
            return function(x, training=True)

    same(between(Drawn()), torch.randn(64, 16))
