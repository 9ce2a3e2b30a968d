"""Devices: the table, and what an operation takes on one of them."""
from __future__ import annotations

import pytest

from torchckpt.errors import ArgumentError
from torchckpt.planning.device import DEVICES, Device, Network, device_named


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_table(device):
    assert device_named(device.name.upper()) is device
    assert device.peak_flops["bfloat16"] == device.peak_flops["float16"]
    assert device.peak_flops["float64"] <= device.peak_flops["float32"] < device.peak_flops["tf32"]
    assert device.peak_flops["tf32"] < device.peak_flops["bfloat16"]
    assert device.link_bytes_per_second < device.bytes_per_second < device.peak_flops["float32"]
    assert "data sheet" in device.source
    network = device.network
    assert network.node_devices == 8
    assert network.outer_bytes_per_second < network.bytes_per_second < device.bytes_per_second
    assert network.latency_seconds < network.outer_latency_seconds
    assert "tuning.cc" in network.source


NETWORK = Network(8, 100.0, 10.0, 1.0, 4.0, 0.5, "made up")


@pytest.mark.parametrize(
    ("kind", "ranks", "on_node", "seconds"),
    [
        ("all_gather", 1, 1, 0.0),
        ("all_gather", 8, 8, 0.5 + 7 * 1.0 + 7 / 8 * 400 / 100),
        ("reduce_scatter", 8, 8, 0.5 + 7 * 1.0 + 7 / 8 * 400 / 100),
        ("all_reduce", 8, 8, 0.5 + 2 * (7 * 1.0 + 7 / 8 * 400 / 100)),
        ("all_gather", 4, 1, 0.5 + 3 * 4.0 + 3 / 4 * 400 / 10),  # each on a node of its own
        ("all_gather", 16, 8, 0.5 + 14 * 1.0 + 4.0 + 15 / 16 * 400 / 80),  # by eight links
        ("broadcast", 8, 8, 0.5 + 7 * 1.0 + 400 / 100),
        ("all_to_all", 8, 8, 0.5 + 1.0 + 7 / 8 * 400 / 100),
        ("all_to_all", 16, 8, 0.5 + 4.0 + 8 / 16 * 400 / 10),
        ("permute", 8, 8, 0.5 + 1.0 + 400 / 100),
        ("permute", 8, 1, 0.5 + 4.0 + 400 / 10),
    ],
)
def test_seconds_of_a_collective(kind, ranks, on_node, seconds):
    assert NETWORK.seconds(kind, 400, ranks, on_node) == pytest.approx(seconds)


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
