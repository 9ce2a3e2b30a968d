"""Random numbers of Python, of NumPy, and of generators that code names or holds: a replay draws them again."""
from __future__ import annotations

import gc
import random
import sys
import weakref
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
from tests.slow import few
from torchckpt import Checkpointing, checkpoint
from torchckpt.regions.state.host_random import HostGenerator, as_generator
from torchckpt.regions.state.reached import reached_by
from torchckpt.testing import assert_transparent

numpy = pytest.importorskip("numpy")
from numpy import random as of_numpy  # noqa: E402

OWN, OF_TORCH, NEW = random.Random(1), torch.Generator().manual_seed(1), numpy.random.default_rng(1)
SAME, BITS = numpy.random.Generator(NEW.bit_generator), numpy.random.PCG64(1)


def helper():
    return gauss(0, 1) * numpy.random.randn()


def own_import():
    import tests.regions.state.numbers as hidden

    return hidden.draw()


def put_back():
    state = OF_TORCH.get_state()
    number = torch.rand((), generator=OF_TORCH)
    OF_TORCH.set_state(state)
    return number


class Drawn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * random.random()


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
    "an import of its own": lambda _: own_import(),
    "an object that is called": lambda _: numbers.DRAW(),
    "a bit generator": lambda _: BITS.random_raw() % 100 / 100,
    "one of two with the same bits": lambda _: NEW.random() + SAME.random(),
    "a function of torch's": lambda _: Drawn.apply(torch.ones(())),
    "one that is put back": lambda _: put_back(),
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
    "between draws": lambda layer, call: partial(
        call, lambda x: call(layer, x * float(layer.draws(layer))).cos() * float(layer.draws(layer))
    ),
    "function": lambda layer, call: partial(call, lambda x: (x.exp() * float(layer.draws(None))).sin()),
}
OF_PROCESS = random.getstate.__self__, numpy.random.mtrand._rand
SOURCES = [as_generator(source) for source in (*OF_PROCESS, OWN, NEW, OF_TORCH, BITS)]


@few(10)
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
        OF_TORCH.manual_seed(5)
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


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
@pytest.mark.parametrize("of", [numpy.random.Generator, numpy.random.RandomState, lambda bits: bits])
def test_states_of_numpy_are_put_back(kind, of):
    source = of(getattr(numpy.random, kind)(1))
    draw = getattr(source, "standard_normal", None) or (lambda: source.random_raw())
    generator, states, drawn = as_generator(source), [], []
    for _ in range(3):
        states.append(generator.get_state())
        drawn.append(draw())
    assert states[0] != states[1]
    for state, number in zip(states[::-1], drawn[::-1]):
        generator.set_state(state)
        assert generator.get_state() == state
        assert draw() == number


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


CURRENT = None


class Draws(nn.Module):
    limit = None

    def forward(self, x):
        return (x.exp() * CURRENT.random() * (self.limit or CURRENT).random()).sin()


@pytest.mark.parametrize("make", [random.Random, numpy.random.default_rng])
def test_a_source_that_another_replaces_is_looked_up_at_each_call(make):
    def gradients_of(call):
        global CURRENT
        layer, gradients = Draws(), []
        for seed in range(3):
            CURRENT, Draws.limit = make(seed), make(seed + 3)
            output = call(layer, x)
            CURRENT.random(), Draws.limit.random()
            gradients += torch.autograd.grad(output.sum(), x)
        return gradients

    x = leaf(3)
    assert_equal(gradients_of(checkpoint), gradients_of(plain))


class Stateless(random.Random):
    def random(self):
        return 0.25

    def getstate(self):
        raise NotImplementedError

    setstate = getstate


@pytest.mark.parametrize("source", [Stateless(), random.SystemRandom()])
def test_a_source_without_a_state(source):
    x = leaf(3)
    checkpoint(lambda x: x.exp() * source.random(), x).sum().backward()
    assert x.grad is not None


def test_a_kept_function_draws_in_a_region_of_torch():
    def function(x):
        return checkpoint(lambda x: torchckpt.keep(lambda y: y * random.random(), x).exp().sin(), x).cos()

    def gradient_of(call):
        random.seed(0)
        return torch.autograd.grad(call(function, x).sum(), x)

    x = leaf(3)
    of_torch = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    assert_equal(gradient_of(of_torch), gradient_of(plain))


class OfInstances:
    def __get__(self, instance, owner):
        if instance is None:
            raise AttributeError
        return torch.exp


def test_a_forward_that_no_class_gives():
    class Odd(nn.Module):
        forward = OfInstances()

    x = leaf(3)
    assert_equal(torch.autograd.grad(checkpoint(Odd(), x).sum(), x), torch.autograd.grad(x.exp().sum(), x))


def test_classes_are_not_held():
    def made():
        class Held:
            layer = nn.Linear(3, 3)

        held = Held()
        checkpoint(lambda x: held.layer(x), leaf(3)).sum().backward()
        return weakref.ref(Held), weakref.ref(Held.layer)

    references = made()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_what_calls_itself_numpy(monkeypatch):
    stranger = ModuleType("numpy")
    monkeypatch.delitem(sys.modules, "numpy")
    x = leaf(3)
    checkpoint(lambda x: (stranger, x.exp())[1], x).sum().backward()
    assert x.grad is not None
