"""Random numbers: a replay draws those of the forward, and leaves the generators where it found them."""
from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.accelerator import random_states as states
from tests.helpers import (
    Block,
    assert_equal,
    assert_program_transparent,
    assert_transparent,
    in_thread,
    leaf,
    plain,
)
from tests.slow import few
from torchckpt import Checkpointing, checkpoint, is_recomputing
from torchckpt.regions import devices
from torchckpt.regions.state import ambient


def test_dropout(call, device):
    assert_transparent(call, lambda x: nn.functional.dropout(x.exp(), 0.5).sin(), leaf(100, device=device))


def test_numbers_of_the_cpu_and_of_the_device_in_one_region(call, device):
    def function(x):
        hidden = nn.functional.dropout(x.exp(), 0.5)
        return hidden * torch.rand(100).to(device) * torch.rand(100, device=device)

    assert_transparent(call, function, leaf(100, device=device))


def test_generators_end_where_they_would_without_a_replay(call, device):
    block, x = Block().to(device), leaf(3, 4, device=device)

    def after(call):
        torch.manual_seed(1)
        call(block, x).sum().backward()
        return states(device)

    assert_equal(after(call), after(plain))


def test_numbers_between_forward_and_backward(call, device):
    def program(call, x):
        hidden = call(lambda x: nn.functional.dropout(x, 0.5).exp(), x)
        return nn.functional.dropout(hidden, 0.5) * torch.rand_like(hidden)

    assert_program_transparent(call, program, leaf(100, device=device))


def test_numbers_in_nested_regions(call, device):
    inner, outer = Block().to(device), Block().to(device)

    def program(call, x):
        return call(lambda x: nn.functional.dropout(outer(call(inner, x)), 0.5).exp(), x)

    assert_program_transparent(call, program, leaf(3, 4, device=device), modules=[inner, outer])


def test_two_regions_replayed_in_the_order_of_their_forwards(device):
    x = leaf(100, device=device)

    def function(x):
        return nn.functional.dropout(x.exp(), 0.5).sin()

    torch.manual_seed(1)
    expected = torch.autograd.grad(function(x).sum() + function(x).sum(), x)
    torch.manual_seed(1)
    regions = [Checkpointing(function, x) for _ in range(2)]
    loss = regions[0].checkpoint().sum() + regions[1].checkpoint().sum()
    for region in regions:
        region.prefetch()
    assert_equal(torch.autograd.grad(loss, x), expected)


@pytest.mark.parametrize("draws", [0, 1, 3])
def test_generators_are_put_back_when_the_replay_raises(device, draws):
    def function(x):
        for _ in range(draws):
            x = nn.functional.dropout(x, 0.5) * torch.rand(100).to(device)
        if is_recomputing():
            raise KeyError("in the replay")
        return x.exp()

    loss = checkpoint(function, leaf(100, device=device)).sum()
    torch.rand(7), torch.rand(7, device=device)
    before = states(device)
    with pytest.raises(KeyError, match="in the replay"):
        loss.backward()
    assert_equal(states(device), before)


def test_generators_are_put_back_when_prefetch_raises(device):
    def function(x):
        hidden = nn.functional.dropout(x, 0.5)
        assert not is_recomputing()
        return hidden.exp()

    region = Checkpointing(function, leaf(100, device=device))
    region.checkpoint()
    before = states(device)
    with pytest.raises(AssertionError):
        region.prefetch()
    assert_equal(states(device), before)


def test_generators_stay_when_the_replay_cannot_begin(device):
    loss = checkpoint(lambda x: nn.functional.dropout(x, 0.5).exp(), leaf(100, device=device)).sum()
    before = states(device)
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        with pytest.raises(RuntimeError, match="no hooks here"):
            loss.backward()
    assert_equal(states(device), before)


def noise(generator, device):
    """A function that draws from a generator of the caller's."""

    def function(x):
        return (x * torch.rand(100, generator=generator, device=device)).exp()

    return function


def test_named_generator(device):
    generator, x = torch.Generator(device).manual_seed(3), leaf(100, device=device)

    def gradients_of(call):
        generator.manual_seed(3)
        gradient = torch.autograd.grad(call(noise(generator, device), x).sum(), x)
        return gradient, generator.get_state()

    region = functools.partial(checkpoint, generators=[generator])
    assert_equal(gradients_of(region), gradients_of(plain))


def test_named_generator_of_a_region_by_hand(device):
    generator, x = torch.Generator(device).manual_seed(3), leaf(100, device=device)
    (expected,) = torch.autograd.grad(noise(generator, device)(x).sum(), x)
    generator.manual_seed(3)
    region = Checkpointing(noise(generator, device), x, generators=(generator,))
    loss = region.checkpoint().sum()
    torch.rand(5, generator=generator, device=device)
    after = generator.get_state()
    region.prefetch()
    assert torch.equal(generator.get_state(), after)
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_two_named_generators(device):
    generators, x = [torch.Generator(device).manual_seed(seed) for seed in (3, 4)], leaf(100, device=device)

    def function(x):
        return noise(generators[0], device)(x) * noise(generators[1], device)(x)

    def gradients_of(call):
        for seed, generator in enumerate(generators):
            generator.manual_seed(seed)
        return torch.autograd.grad(call(function, x).sum(), x)

    assert_equal(gradients_of(functools.partial(checkpoint, generators=generators)), gradients_of(plain))


def test_generator_that_a_function_closes_over(call, device):
    generator = torch.Generator(device)

    def left_by(call):
        generator.manual_seed(3)
        gradient = torch.autograd.grad(call(noise(generator, device), x).sum(), x)
        return gradient, generator.get_state()

    x = leaf(100, device=device)
    assert_equal(left_by(call), left_by(plain))


HIDDEN = torch.Generator()


def test_generator_that_is_reached_by_a_computed_name_is_not_put_back():
    loss = checkpoint(lambda x: noise(globals()["HID" + "DEN"], "cpu")(x), leaf(100)).sum()
    after = HIDDEN.get_state()
    loss.backward()
    assert not torch.equal(HIDDEN.get_state(), after)


@dataclass
class Source:
    """An object that has a generator, and no pytree."""

    generator: torch.Generator


def draws(x, source):
    """Draws from a generator, wherever ``source`` has it."""
    found = source[0] if isinstance(source, (list, tuple)) else source
    found = found["generator"] if isinstance(found, dict) else found
    found = found.generator if isinstance(found, Source) else found
    return (x * torch.rand(x.shape, generator=found, device=x.device)).exp()


SOURCES = {
    "itself": lambda generator: generator,
    "in a tuple": lambda generator: (generator,),
    "in a list of dicts": lambda generator: [{"generator": generator}],
    "in an object": Source,
}
WAYS = {
    "by position": lambda call, x, source: call(draws, x, source),
    "by keyword": lambda call, x, source: call(draws, x, source=source),
    "in a partial": lambda call, x, source: call(functools.partial(draws, source=source), x),
    "twice": lambda call, x, source: call(draws, call(draws, x, source), source),
    "in an inner region alone": lambda call, x, source: call(lambda x: call(draws, x.sin(), source).cos(), x),
    "in both": lambda call, x, source: call(lambda x, source: call(draws, x.sin(), source).cos(), x, source),
    "two inside": lambda call, x, source: call(lambda x: call(draws, call(draws, x, source).sin(), source), x),
}


@few(21)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", SOURCES)
def test_generator_among_the_arguments(call, kind, way, device):
    source, x = torch.Generator(device), leaf(20, device=device)

    def left_by(call):
        source.manual_seed(3)
        (gradient,) = torch.autograd.grad(WAYS[way](call, x, SOURCES[kind](source)).sum(), x)
        return gradient, source.get_state()

    assert_equal(left_by(call), left_by(plain))


def test_generator_among_the_arguments_without_preserve_rng_state(device):
    source, x = torch.Generator(device).manual_seed(3), leaf(20, device=device)
    loss = checkpoint(draws, x, source, preserve_rng_state=False).sum()
    after = source.get_state()
    loss.backward()
    assert not torch.equal(source.get_state(), after)


class CountingGenerator(torch.Generator):
    """Counts how often its state is read and put back."""

    reads = writes = 0

    def get_state(self):
        self.reads += 1
        return super().get_state()

    def set_state(self, state):
        self.writes += 1
        return super().set_state(state)


@pytest.fixture
def generator(monkeypatch):
    """In place of the CPU's default generator, as far as snapshots go."""
    generator = CountingGenerator()
    monkeypatch.setattr(torch, "default_generator", generator)
    monkeypatch.setattr(devices, "accelerator_type", lambda: None)
    return generator


def test_snapshot_is_one_read_in_the_forward_and_an_exchange_in_the_replay(generator):
    output = checkpoint(torch.exp, leaf(3))
    assert (generator.reads, generator.writes) == (1, 0)
    output.sum().backward()
    assert (generator.reads, generator.writes) == (2, 2)


def test_no_snapshot_without_preserve_rng_state(generator):
    checkpoint(torch.exp, leaf(3), preserve_rng_state=False).sum().backward()
    assert (generator.reads, generator.writes) == (0, 0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_no_snapshot_where_gradients_are_off(generator, mode):
    with mode():
        checkpoint(torch.exp, leaf(3))
    assert (generator.reads, generator.writes) == (0, 0)


def test_named_generator_is_read_as_often():
    generator = CountingGenerator()
    checkpoint(noise(generator, "cpu"), leaf(100), generators=[generator]).sum().backward()
    assert (generator.reads, generator.writes) == (2, 2)


class DeviceModule:
    """A device's module with functions for its generator, but no ``default_generators``."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def get_rng_state(self, *args):
        self.calls.append(("get", *args))
        return "state"

    def set_rng_state(self, *args):
        self.calls.append(("set", *args))


@pytest.mark.parametrize(("device", "named"), [("xpu:1", [torch.device("xpu:1")]), ("mps", [])])
def test_generator_of_a_device_without_default_generators(monkeypatch, device, named):
    module = DeviceModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    cpu, generator = ambient.generators_of([torch.device(device)], [])
    assert cpu is torch.default_generator
    generator.set_state(generator.get_state())
    assert module.calls == [("get", *named), ("set", "state", *named)]


def test_replay_draws_new_numbers_without_preserve_rng_state(device):
    drawn = []

    def function(x):
        drawn.append(torch.rand(100, device=device))
        return (x * drawn[-1]).exp()

    before = states(device)
    checkpoint(function, leaf(100, device=device), preserve_rng_state=False).sum().backward()
    assert not torch.equal(drawn[0], drawn[1])
    assert not all(map(torch.equal, states(device), before))


def test_replay_in_another_thread_draws_the_same_numbers(device):
    block, x = Block().to(device), leaf(3, 4, device=device)

    def gradients_of(call):
        torch.manual_seed(1)
        return in_thread(torch.autograd.grad, call(block, x).sum(), x)

    assert_equal(gradients_of(checkpoint), gradients_of(plain))


@pytest.mark.accelerator
def test_two_devices_in_one_region(call, two_accelerators):
    def function(x, y):
        return nn.functional.dropout(x.exp(), 0.5).cpu() + nn.functional.dropout(y.exp(), 0.5).cpu()

    x, y = (leaf(100, device=device) for device in two_accelerators)
    assert_transparent(call, function, x, y)


@pytest.mark.accelerator
def test_device_that_only_a_keyword_lies_on(call, accelerator):
    def function(x, *, others):
        return x.exp() + nn.functional.dropout(others[0].exp(), 0.5).cpu()

    assert_transparent(call, function, leaf(100), others=[leaf(100, device=accelerator)])


@pytest.mark.accelerator
def test_device_that_no_argument_lies_on(call, accelerator):
    def function(x):
        return nn.functional.dropout(x.to(accelerator).exp(), 0.5).cpu().exp()

    assert_transparent(call, function, leaf(100))


class Stubborn:
    """A generator whose state can be read and not set."""

    def get_state(self):
        return torch.zeros(1)

    def set_state(self, state):
        if state.any():
            raise RuntimeError("no")


def test_states_are_put_back_where_another_generator_raises_in_the_exchange():
    generator = torch.Generator().manual_seed(1)
    other = torch.Generator().manual_seed(2).get_state()
    before = generator.get_state()
    with pytest.raises(RuntimeError, match="no"):
        ambient.set_states([(generator, other), (Stubborn(), torch.ones(1))])
    assert torch.equal(generator.get_state(), before)
