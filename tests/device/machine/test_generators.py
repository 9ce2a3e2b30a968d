"""Generators: one for each device, whose draws follow from the order of the calls alone."""
from __future__ import annotations

import pytest
import torch
from torch import nn

DRAWS = {
    "rand": lambda device: torch.rand(5, device=device),
    "randn_like": lambda device: torch.randn_like(torch.ones(5, device=device)),
    "randint": lambda device: torch.randint(100, (5,), device=device),
    "randperm": lambda device: torch.randperm(20, device=device),
    "bernoulli_": lambda device: torch.ones(5, device=device).bernoulli_(0.5),
    "normal_": lambda device: torch.empty(5, device=device).normal_(),
    "exponential_": lambda device: torch.empty(5, device=device).exponential_(),
    "multinomial": lambda device: torch.ones(20, device=device).multinomial(5),
    "dropout": lambda device: nn.functional.dropout(torch.ones(20, device=device), 0.5),
    "dropout2d": lambda device: nn.functional.dropout2d(torch.ones(2, 20, 1, 1, device=device), 0.5),
    "alpha_dropout": lambda device: nn.functional.alpha_dropout(torch.ones(20, device=device), 0.5, training=True),
    "rrelu": lambda device: nn.functional.rrelu(-torch.ones(20, device=device), training=True),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_follow_from_the_seed(sim, draw):
    torch.manual_seed(7)
    first, other = draw("sim:0"), draw("sim:0")
    torch.manual_seed(7)
    again = draw("sim:0")
    torch.manual_seed(8)
    third = draw("sim:0")
    assert torch.equal(first.cpu(), again.cpu())
    assert not torch.equal(first.cpu(), other.cpu())
    assert not torch.equal(first.cpu(), third.cpu())
    assert sim.counts().synchronous == {}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_leave_the_other_generators_alone(sim, draw):
    states = [torch.get_rng_state(), torch.sim.get_rng_state("sim:1")]
    draw("sim:0")
    sim.synchronize()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.sim.get_rng_state("sim:1"), states[1])


def drawn():
    torch.manual_seed(3)
    streams = [torch.Stream(f"sim:{device}") for device in (0, 0, 1)]
    draws = []
    for _ in range(10):
        for stream in streams:
            with stream:
                draws.append(torch.rand(4, device=stream.device))
                draws.append(nn.functional.dropout(torch.ones(8, device=stream.device)))
    torch.sim.synchronize(0)
    torch.sim.synchronize(1)
    return [draw.cpu() for draw in draws]


@pytest.mark.parametrize("seed", range(5))
def test_draws_are_the_same_whatever_the_delays(sim, seed):
    expected = drawn()
    with sim.delays(seed):
        received = drawn()
    assert all(torch.equal(*pair) for pair in zip(expected, received))


def test_a_state_is_put_back(sim):
    state = torch.sim.get_rng_state("sim:2")
    first = torch.rand(3, device="sim:2")
    torch.sim.set_rng_state(state, "sim:2")
    assert torch.equal(torch.rand(3, device="sim:2").cpu(), first.cpu())
    assert (state.dtype, state.shape, state.device.type) == (torch.uint8, (16,), "cpu")


def test_a_state_that_is_none_is_an_error(sim):
    with pytest.raises(RuntimeError, match="the state of a generator of sim is 16 contiguous bytes"):
        torch.sim.set_rng_state(torch.get_rng_state())


def test_devices_draw_from_generators_of_their_own(sim):
    torch.manual_seed(1)
    generators = torch.sim.default_generators
    assert [generator.device for generator in generators] == [torch.device("sim", index) for index in range(4)]
    assert {generator.initial_seed() for generator in generators} == {1}
    torch.rand(3, device="sim:0")
    assert [generator.get_offset() for generator in generators] == [1, 0, 0, 0]


def test_a_generator_that_is_named(sim):
    one, other = torch.Generator("sim:0").manual_seed(5), torch.Generator("sim:0").manual_seed(5)
    before = torch.sim.get_rng_state(0)
    first = torch.rand(3, device="sim:0", generator=one)
    assert torch.equal(torch.empty(3, device="sim:0").uniform_(generator=other).cpu(), first.cpu())
    assert torch.equal(one.get_state(), other.clone_state().get_state())
    assert torch.equal(torch.sim.get_rng_state(0), before)


def test_a_generator_of_the_cpu_is_an_error(sim):
    with pytest.raises(RuntimeError, match=r"draws from a generator of sim, as torch.Generator\('sim:0'\), not of cpu"):
        torch.empty(3, device="sim:0").uniform_(generator=torch.Generator())


def test_fork_rng_puts_all_back(sim):
    states = torch.sim.get_rng_state_all()
    with torch.random.fork_rng(range(4), device_type="sim"):
        torch.rand(3, device="sim:1")
    assert all(torch.equal(*pair) for pair in zip(torch.sim.get_rng_state_all(), states))
