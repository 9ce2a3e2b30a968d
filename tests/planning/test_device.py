"""Devices: the table, and what an operation takes on one of them."""
from __future__ import annotations

import pytest

from torchckpt.errors import ArgumentError
from torchckpt.planning.device import DEVICES, Device, device_named


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_table(device):
    assert device_named(device.name.upper()) is device
    assert device.peak_flops["bfloat16"] == device.peak_flops["float16"]
    assert device.peak_flops["float64"] <= device.peak_flops["float32"] < device.peak_flops["tf32"]
    assert device.peak_flops["tf32"] < device.peak_flops["bfloat16"]
    assert device.link_bytes_per_second < device.bytes_per_second < device.peak_flops["float32"]
    assert "data sheet" in device.source


def test_seconds_are_the_larger_of_computing_and_moving():
    device = Device("made up", {"bfloat16": 100.0, "float32": 10.0}, 5.0, 1.0, 1.0, "made up")
    assert device.seconds(1000, 10, "bfloat16") == 10.0
    assert device.seconds(1000, 10, "bfloat16", efficiency=0.5) == 20.0
    assert device.seconds(1000, 1000, "bfloat16", efficiency=0.5) == 200.0
    assert device.seconds(1000, 10, "float32") == 100.0
    assert device.seconds(1000, 10, "complex64") == 100.0  # as float32


@pytest.mark.parametrize("name", ["v100", "", None])
def test_unknown_device(name):
    with pytest.raises(ArgumentError, match="the device is not one of a100, h100, h200, b200, mi300x, or a Device"):
        device_named(name)
