"""Streams: who waits for whom, with recording streams on the CPU in place of an accelerator's."""
from __future__ import annotations

import pytest
import torch

from tests.accelerator import module_of
from tests.helpers import leaf
from torchckpt import Checkpointing, checkpoint
from torchckpt.regions import devices
from torchckpt.regions.devices import SyncPoint, accelerators_among


class Stream:
    """Writes down what it is asked, under its name."""

    device = torch.device("cpu")

    def __init__(self, name, events) -> None:
        self.name, self.events = name, events

    def record_event(self):
        number = sum(" records " in event for event in self.events) + 1
        self.events.append(f"{self.name} records {number}")
        return number

    def wait_event(self, event) -> None:
        self.events.append(f"{self.name} waits for {event}")


class Machine:
    """A machine whose CPU passes for an accelerator with two streams."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.compute, self.side = Stream("compute", self.events), Stream("side", self.events)
        self.current = self.compute

    def on(self, stream, call):
        self.current = stream
        result = call()
        self.current = self.compute
        return result


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()

    def record_stream(tensor, stream):
        machine.events.append(f"{stream.name} uses {tuple(tensor.shape)}")

    monkeypatch.setattr(devices, "accelerator_type", lambda: "cpu")
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: machine.current)
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    return machine


def region_of_one_slot():
    """Its input is of shape (2,); what it saves is of shape (3, 2)."""
    return Checkpointing(lambda x: x.expand(3, 2).exp(), leaf(2), preserve_rng_state=False)


def test_one_stream_waits_for_nothing(machine):
    loss = region_of_one_slot().checkpoint().sum()
    loss.backward()
    assert machine.events == [
        "compute records 1",  # the entry of the forward: its inputs are ready
        "compute records 2",  # the end of the replay
    ]


ON_ANOTHER_STREAM = {
    "prefetch": [
        "compute records 1",
        # the replay waits for the inputs, and keeps their memory
        "side waits for 1",
        "side uses (2,)",
        "side records 2",
        # the backward waits for the replay, and keeps the memory of what it made
        "compute waits for 2",
        "compute uses (3, 2)",
    ],
    "forward": [
        "side records 1",
        "compute waits for 1",
        "compute uses (2,)",
        "compute records 2",
    ],
    "forward and prefetch": [
        "side records 1",
        "side records 2",
        "compute waits for 2",
        "compute uses (3, 2)",
    ],
}


@pytest.mark.parametrize("what", ON_ANOTHER_STREAM)
def test_on_another_stream(machine, what):
    region = region_of_one_slot()
    loss = machine.on(machine.side if "forward" in what else machine.compute, region.checkpoint).sum()
    if "prefetch" in what:
        machine.on(machine.side, region.prefetch)
    loss.backward()
    assert machine.events == ON_ANOTHER_STREAM[what]


def test_second_prefetch_records_nothing(machine):
    region = region_of_one_slot()
    region.checkpoint()
    machine.on(machine.side, region.prefetch)
    before = list(machine.events)
    region.prefetch()
    assert machine.events == before


def test_forward_without_a_backward_records_its_entry_only(machine):
    region_of_one_slot().checkpoint()
    assert machine.events == ["compute records 1"]


def test_trail_keeps_the_memory_of_tensors_on_its_device_only(machine):
    sync_point = SyncPoint((torch.device("cpu"),))
    tensors = [torch.empty(2), torch.empty(3, device="meta"), torch.empty(4)]
    machine.on(machine.side, lambda: sync_point.wait_before_using(tensors))
    assert machine.events == ["compute records 1", "side waits for 1", "side uses (2,)", "side uses (4,)"]


def test_machine_without_an_accelerator_asks_for_no_stream(monkeypatch):
    monkeypatch.setattr(devices, "accelerator_type", lambda: None)
    monkeypatch.setattr(torch.accelerator, "current_stream", None)
    checkpoint(torch.exp, leaf(3)).sum().backward()


def meta(*shape):
    return torch.empty(*shape, device="meta")


def test_accelerators_are_those_of_tensors_in_containers_and_keywords(monkeypatch):
    monkeypatch.setattr(devices, "accelerator_type", lambda: "meta")
    found = (torch.device("meta"),)
    assert accelerators_among((meta(1),), {}) == found
    assert accelerators_among(([{"a": meta(1)}, 3],), {}) == found
    assert accelerators_among((torch.empty(1),), {"key": (meta(1), meta(2))}) == found


def test_accelerator_of_a_call_without_tensors_there_is_the_current_one(monkeypatch):
    monkeypatch.setattr(devices, "accelerator_type", lambda: "meta")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert accelerators_among((torch.empty(1), None), {}) == (torch.device("meta", 3),)


def test_no_accelerators_without_one(monkeypatch):
    monkeypatch.setattr(devices, "accelerator_type", lambda: None)
    assert accelerators_among((torch.empty(1), meta(1)), {}) == ()


@pytest.mark.accelerator
def test_prefetch_on_a_stream_that_is_late(accelerator):
    x, device = leaf(1 << 20, device=accelerator), module_of(accelerator)
    expected = torch.autograd.grad(x.exp().sin().sum(), x)[0]
    region = Checkpointing(lambda x: x.exp().sin(), x)
    loss = region.checkpoint().sum()
    with device.stream(device.Stream()):
        device._sleep(100_000_000)
        region.prefetch()
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


@pytest.mark.accelerator
def test_forward_on_a_stream_that_is_late(accelerator):
    x, device = leaf(1 << 20, device=accelerator), module_of(accelerator)
    expected = torch.autograd.grad((x * 2).exp().sin().sum(), x)[0]
    device.synchronize()
    side = device.Stream()
    with device.stream(side):
        device._sleep(100_000_000)
        region = Checkpointing(lambda x: x.exp().sin(), x * 2)
        output = region.checkpoint()
    region.prefetch()
    device.current_stream().wait_stream(side)
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)
