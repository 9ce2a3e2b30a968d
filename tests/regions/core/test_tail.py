"""The end of a replay: nothing runs after the last tensor that it saves, with and without an exception."""
from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import assert_transparent, leaf
from torchckpt import checkpoint
from torchckpt.regions.core import frame as frames
from torchckpt.regions.core.options import Options

scale = torch.tensor(2.0)


class Operators(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def ends(x):
    return (x * scale).exp()


def through_another(x):
    return ends(x.sin())


def kept_in_a_name(x):
    y = (x * scale).exp()
    return y  # noqa: RET504


def in_a_context(x):
    with torch.autograd.profiler.record_function("of the user"):
        return (x * scale).exp()


def last_of_a_reduction(x):
    return functools.reduce(lambda y, function: function(y), [torch.sin, torch.exp], x)


def in_the_middle_of_a_reduction(x):
    return functools.reduce(lambda y, function: function(y), [torch.exp, lambda y: y + 1], x)


def calls_itself(x, depth=2):
    if depth:
        return calls_itself(x.sin(), depth - 1) + 1
    return (x * scale).exp()


def counts_after(x):
    y = (x * scale).exp()
    ran.append("after")
    return y


def looks_after(x):
    y = (x * scale).exp()
    y.detach().mean()
    return y


def saves_an_input(x):
    return (x * scale).sin()


def saves_its_result_twice(x):
    y = x.exp()
    y.sin()
    return y


def in_place_at_last(x):
    return (x * scale).exp_()


def two_outputs(x):
    return (x * scale).exp(), x


def a_product(x):
    return (x * scale).exp() @ weight


def cleans_up(x):
    try:
        return (x * scale).exp()
    finally:
        ran.append("cleaned")


ran = []
weight = torch.randn(4, 4)
FUNCTIONS = [ends, through_another, kept_in_a_name, in_a_context, last_of_a_reduction, counts_after, looks_after]
FUNCTIONS += [in_the_middle_of_a_reduction, calls_itself]
FUNCTIONS += [saves_an_input, saves_its_result_twice, in_place_at_last, two_outputs, a_product, cleans_up]
FUNCTIONS += [nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), nn.LayerNorm(4), nn.Tanh()]
NAMES = [getattr(function, "__name__", type(function).__name__) for function in FUNCTIONS]


def replayed(function):
    ran.clear()
    y = checkpoint(function, leaf(3, 4).cos())
    first = y[0] if isinstance(y, tuple) else y
    ran.clear()
    if isinstance(function, nn.Module):
        function.zero_grad()
    with Operators() as operators:
        first.sum().backward()
    return operators.seen, list(ran)


@pytest.mark.parametrize("function", FUNCTIONS, ids=NAMES)
def test_no_operator_and_no_statement_more_than_with_an_exception(function, monkeypatch):
    ours = replayed(function)
    monkeypatch.setattr(frames, "goes_on", lambda *_: False)
    assert ours == replayed(function)


@pytest.mark.parametrize("function", FUNCTIONS, ids=NAMES)
def test_equal_to_the_bit(function):
    modules = [function] if isinstance(function, nn.Module) else []
    assert_transparent(checkpoint, function, leaf(3, 4), modules=modules)


@pytest.mark.parametrize("function", FUNCTIONS, ids=NAMES)
def test_which_need_no_exception(function, monkeypatch):
    answers, plain = [], frames.goes_on

    def goes_on(*given):
        answers.append(plain(*given))
        return answers[-1]

    monkeypatch.setattr(frames, "goes_on", goes_on)
    y = checkpoint(function, leaf(3, 4))
    (y[0] if isinstance(y, tuple) else y).sum().backward()
    assert answers == [function in (ends, in_place_at_last)]


@pytest.mark.parametrize("training", [True, False])
def test_noise_that_is_saved_before_it_is_written(training):
    """rrelu saves its noise, and its kernel writes it then: a replay does not end in between."""
    layer = nn.RReLU().train(training)
    assert_transparent(checkpoint, lambda x: layer(x * 2), leaf(64))
    assert_transparent(checkpoint, lambda x: torch.rrelu(x * 2, training=training), leaf(64))


@pytest.mark.parametrize("raises", [False, True], ids=["", "that raises an error"])
@pytest.mark.parametrize("early_stop", [True, False], ids=["", "to the end"])
def test_where_somebody_asks_for_it_the_function_runs_on(early_stop, raises):
    events, x = [], leaf(3, 4)

    def function(x):
        y = (x * scale).exp()
        events.append("after")
        if raises and early_stop and len(events) > 1:
            raise ValueError("in its tail")
        return y

    region = frames.Frame(Options(early_stop=early_stop))
    y = region.forward(function, (x,), {})
    region.tail = lambda: events.append("tail")
    y.sum().backward()
    assert events == ["after", *["tail"] * early_stop, "after"]
    assert torch.equal(x.grad, 2 * (x * scale).exp())


def test_an_error_before_its_tail_is_one():
    calls = []

    def function(x):
        calls.append(0)
        if len(calls) > 1:
            raise ValueError("before its tail")
        return (x * scale).exp() + 1

    region = frames.Frame(Options())
    y = region.forward(function, (leaf(3, 4),), {})
    region.tail = lambda: calls.append(1)
    with pytest.raises(ValueError, match="before its tail"):
        y.sum().backward()
    assert calls == [0, 0]
