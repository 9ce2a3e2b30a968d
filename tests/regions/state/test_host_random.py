"""Random numbers of Python, of NumPy, and of generators that code names or holds: a replay draws them again."""
from __future__ import annotations

import random
import sys
from functools import partial
from random import gauss
from random import random as uniform
from types import ModuleType

import pytest
import torch
from torch import nn

import torchckpt
from tests.helpers import assert_equal, leaf, plain
from tests.regions.state import numbers
from torchckpt import Checkpointing, checkpoint
from torchckpt.regions.state.host_random import HostGenerator, as_generator
from torchckpt.regions.state.reached import reached_by
from torchckpt.testing import assert_transparent

numpy = pytest.importorskip("numpy")
from numpy import random as of_numpy  # noqa: E402

OWN, OF_TORCH, NEW = random.Random(1), torch.Generator().manual_seed(1), numpy.random.default_rng(1)


def helper():
    return gauss(0, 1) * numpy.random.randn()


class Layer(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.linear, self.draws = nn.Linear(4, 4), draw
        self.own, self.new = random.Random(2), numpy.random.default_rng(2)


def layer_of(draw):
    """A layer whose code is that of ``draw``."""

    class Drawing(Layer):
        draw_number = draw

        def forward(self, x):
            return (self.linear(x).exp() * float(self.draw_number())).sin()

    return Drawing(draw)


DRAWS = {
    "random.random": lambda _: random.random(),
    "a function of it": lambda _: uniform(),
    "a method of it": lambda _: gauss(0, 1),
    "numpy.random": lambda _: numpy.random.rand(),
    "numpy.random as a module": lambda _: of_numpy.uniform(),
    "another function": lambda _: helper(),
    "another file": lambda _: numbers.draw(),
    "a global random.Random": lambda _: OWN.random(),
    "a global generator of NumPy": lambda _: NEW.random(),
    "a global generator of torch": lambda _: torch.rand((), generator=OF_TORCH),
    "an attribute": lambda layer: layer.own.random() if isinstance(layer, nn.Module) else OWN.random(),
    "an attribute of NumPy": lambda layer: layer.new.random() if isinstance(layer, nn.Module) else NEW.random(),
}


def by_hand(function, x):
    region = Checkpointing(function, x)
    return region.recompute(region.checkpoint())


FORMS = {
    "module": lambda layer, call: partial(call, layer),
    "method": lambda layer, call: partial(call, layer.forward),
    "closure": lambda layer, call: partial(call, lambda x: layer(x)),
    "nested": lambda layer, call: partial(call, lambda x: call(layer, x).cos()),
    "twice": lambda layer, call: lambda x: call(layer, call(layer, x)),
    "function": lambda layer, call: partial(call, lambda x: (x.exp() * float(layer.draws(None))).sin()),
}
SOURCES = [as_generator(source) for source in (random.getstate.__self__, numpy.random.mtrand._rand, OWN, NEW, OF_TORCH)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("region", [checkpoint, by_hand])
def test_a_replay_draws_the_numbers_of_its_forward(region, draw, form):
    x = leaf(3, 4)

    def left_by(call):
        torch.manual_seed(0)
        layer, before = layer_of(DRAWS[draw]), [source.get_state() for source in SOURCES]
        for _ in range(2):
            random.random()
            output = FORMS[form](layer, call)(x)
        then = [random.random(), numpy.random.rand()]  # between forward and backward
        gradients = torch.autograd.grad(output.sum(), [x, *layer.parameters()], allow_unused=True)
        after = [source.get_state() for source in SOURCES]
        for source, state in zip(SOURCES, before):
            source.set_state(state)
        return [output, *(gradient for gradient in gradients if gradient is not None)], then, after

    (results, *states), (expected, *states_of_plain) = left_by(region), left_by(plain)
    assert_equal(results, expected)
    assert str(states) == str(states_of_plain)


@pytest.mark.parametrize("source", [random.Random(1), numpy.random.default_rng(1), numpy.random.RandomState(1)])
def test_a_generator_among_the_arguments(source):
    def function(x, source):
        return (x.exp() * source.normal(0, 1) if hasattr(source, "normal") else x.exp() * source.random()).sin()

    def left_by(call):
        before = HostGenerator(source).get_state()
        (gradient,) = torch.autograd.grad(call(function, x, source).sum(), x)
        after = HostGenerator(source).get_state()
        HostGenerator(source).set_state(before)
        return gradient, after

    x = leaf(3)
    (received, after), (expected, after_plain) = left_by(checkpoint), left_by(plain)
    assert torch.equal(received, expected)
    assert after == after_plain


def test_a_kept_function_draws_once():
    def function(x):
        return (torchckpt.keep(lambda y: y * random.random(), x) * random.random()).exp().sin()

    def gradient_of(call):
        random.seed(0)
        return torch.autograd.grad(call(function, x).sum(), x), random.random()

    x = leaf(3)
    assert_equal(gradient_of(checkpoint), gradient_of(plain))


def test_what_draws_from_nothing_holds_no_state():
    class Names(nn.Module):
        def forward(self, x):
            return x.exp() * random.random() if len(x) > 5 else x.exp().sin()

    few, many = (Checkpointing(Names(), leaf(size)) for size in (3, 6))
    outputs = [region.checkpoint() for region in (few, many)]
    assert len(outputs) == 2
    of_host = [[type(each) is HostGenerator for each in region._frame.generators] for region in (few, many)]
    assert [sum(each) for each in of_host] == [0, 1]


def test_generators_without_a_state_and_strangers_are_left_out():
    assert as_generator(random) is None
    assert as_generator(OF_TORCH) is OF_TORCH
    assert {as_generator(OWN), HostGenerator(OWN)} == {HostGenerator(OWN)} != {HostGenerator(random.Random(1))}


def test_assert_transparent_starts_both_calls_from_the_same_state():
    assert_transparent(lambda x: x.exp() * helper(), leaf(3))
    assert_transparent(layer_of(DRAWS["numpy.random"]), leaf(3, 4))


class Lazy(ModuleType):
    """NumPy before its ``random`` was asked for."""

    def __getattr__(self, name):
        return getattr(numpy, name)


def test_numpy_that_has_not_drawn_yet(monkeypatch):
    lazy = Lazy("numpy")
    monkeypatch.setitem(sys.modules, "numpy", lazy)
    assert SOURCES[1] in reached_by(lambda: lazy.random.rand())[1]
