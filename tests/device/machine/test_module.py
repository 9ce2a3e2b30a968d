"""``torch.sim`` and ``torch.accelerator``: what those who use ``torch.cuda`` expect."""
from __future__ import annotations

import pytest
import torch


def test_the_accelerator_of_this_process(sim):
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == torch.sim.device_count() == 4
    assert torch.get_device_module("sim") is torch.sim
    assert torch.sim.is_available()
    x = torch.ones(1, device="sim")
    assert (x.device, x.is_sim, x.sim(2).device) == (torch.device("sim:0"), True, torch.device("sim:2"))
    assert torch.sim.is_initialized()


def test_current_device(sim):
    torch.sim.set_device(2)
    try:
        assert torch.sim.current_device() == 2
        assert torch.empty(0, device="sim").device == torch.device("sim:2")
        with torch.sim.device("sim:1"), torch.sim.device_of(torch.empty(0)):
            assert torch.empty(0, device="sim").device.index == 1
            with torch.sim.device_of(torch.empty(0, device="sim:3")), torch.accelerator.device_index(0):
                assert torch.accelerator.current_device_index() == 0
        assert torch.sim.current_device() == 2
    finally:
        torch.sim.set_device("sim:0")


def test_streams(sim):
    stream = torch.sim.Stream(1, priority=-1)
    with torch.sim.stream(stream), torch.sim.stream(None):
        assert torch.sim.current_stream() == stream
        assert torch.sim.current_stream("sim:0") == torch.sim.default_stream(0)
    assert torch.sim.current_device() == 0
    torch.sim.set_stream(stream)
    assert torch.sim.current_stream(1) == stream
    torch.sim.set_stream(torch.sim.default_stream(1))
    torch.sim.set_device(0)


def test_events(sim):
    begin, end = torch.sim.Event(enable_timing=True), torch.sim.Event(enable_timing=True)
    with sim.held():
        begin.record()
        torch.sim._sleep(2_000_000)  # cycles of a clock of 2 GHz
        end.record(torch.sim.current_stream())
    end.synchronize()
    assert begin.query()
    assert begin.elapsed_time(end) >= 1.0
    with pytest.raises(ValueError, match="enable_timing=True"):
        torch.sim.Event().elapsed_time(end)


def test_random_numbers(sim):
    torch.sim.manual_seed(5)
    states = torch.sim.get_rng_state_all()
    first = torch.rand(2, device="sim:0")
    torch.sim.set_rng_state_all(states)
    assert torch.equal(first, torch.rand(2, device="sim:0"))
    assert torch.sim.initial_seed() == 5
    torch.sim.seed_all()
    assert torch.sim.initial_seed() != 5
    torch.sim.manual_seed_all(0)


def test_memory(sim):
    x = torch.empty(8, device="sim:1")
    assert torch.sim.memory_allocated(1) == torch.sim.memory_reserved("sim:1") >= x.nbytes
    torch.sim.reset_peak_memory_stats(1)
    assert torch.sim.max_memory_allocated(1) == torch.accelerator.memory_allocated(1)
    assert torch.sim.mem_get_info(1)[1] == 64 << 30
    torch.sim.empty_cache()


WRONG = {
    "torch.zeros": lambda: torch.zeros(1, device="sim:9"),
    "to": lambda: torch.zeros(1).to("sim:9"),
    "empty": lambda: torch.empty(0, device="sim:9"),
    "Stream": lambda: torch.Stream("sim:9"),
    "Generator": lambda: torch.Generator("sim:9"),
    "accelerator.set_device_index": lambda: torch.accelerator.set_device_index(9),
    "accelerator.current_stream": lambda: torch.accelerator.current_stream(9),
    "accelerator.synchronize": lambda: torch.accelerator.synchronize(9),
    "accelerator.memory_allocated": lambda: torch.accelerator.memory_allocated(9),
    "accelerator.device_index": lambda: torch.accelerator.device_index(9).__enter__(),
    "sim.set_device": lambda: torch.sim.set_device("sim:9"),
    "sim.get_rng_state": lambda: torch.sim.get_rng_state(9),
    "sim.default_stream": lambda: torch.sim.default_stream(9),
    "Module.to": lambda: torch.nn.Linear(2, 2).to("sim:9"),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_a_device_that_does_not_exist(sim, call):
    torch.ones(1, device="sim")
    with pytest.raises(RuntimeError) as error:
        call()
    assert str(error.value) == (
        "there is no sim:9: this process has 4 simulated devices, sim:0 to sim:3. Use one of those, as in "
        "torch.zeros(2, device='sim:3'), or ask for more before the first use: tests.device.load(devices=10)."
    )
