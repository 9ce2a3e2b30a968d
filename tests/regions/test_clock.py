"""The clock, on stopped clocks: one of the CPU, and one of a device that it must not wait for."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from torchckpt.regions import devices
from torchckpt.regions.devices import Clock


@pytest.fixture
def now(monkeypatch):
    """What ``time.perf_counter`` says, in a list of one."""
    says = [100.0]
    monkeypatch.setattr(devices, "time", SimpleNamespace(perf_counter=lambda: says[0]))
    return says


class Device:
    """A device whose stream has its own time, in milliseconds."""

    def __init__(self) -> None:
        self.time, self.calls = 0.0, []

    def Event(self, enable_timing):  # torch's name
        assert enable_timing
        return Event(self)

    def current_stream(self, device):
        return f"stream of {device}"

    def synchronize(self, device):
        self.calls.append(f"synchronize {device}")


class Event:
    def __init__(self, device) -> None:
        self.device, self.time = device, None

    def record(self, stream):
        self.device.calls.append(f"record on {stream}")
        self.time = self.device.time

    def synchronize(self):
        self.device.calls.append("wait")

    def elapsed_time(self, other):
        return other.time - self.time


def test_on_the_cpu_a_stamp_is_seconds(now):
    cpu = Clock(torch.device("cpu"))
    first = cpu.stamp()
    now[0] += 2.5
    assert list(map(cpu.reader(), [first, cpu.stamp()])) == [100.0, 102.5]


def test_on_a_device_stamps_are_events_counted_back_from_now(now, monkeypatch):
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda one: device)
    of_device = Clock(torch.device("cuda", 1))
    stamps = []
    for device.time in (40.0, 540.0):
        stamps.append(of_device.stamp())
    assert device.calls == ["record on stream of cuda:1"] * 2  # a stamp waits for nothing
    device.calls.clear()
    now[0], device.time = 900.0, 1040.0
    assert list(map(of_device.reader(), stamps)) == [899.0, 899.5]
    assert device.calls == ["synchronize cuda:1", "record on stream of cuda:1", "wait"]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_where_there_are_no_events_a_stamp_is_seconds(now, device):
    of_device = Clock(torch.device(device))
    assert of_device.reader()(of_device.stamp()) == now[0]


def test_a_device_without_events_is_timed_by_the_host(now, monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda one: SimpleNamespace())
    assert Clock(torch.device("xpu")).stamp() == now[0]
