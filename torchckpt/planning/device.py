"""Device: the peak FLOPs and bytes per second of an accelerator, from its data sheet."""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchckpt.errors import Fault, called, raise_fault

__all__ = ["BUFFERS", "DEVICES", "MARGIN", "Device", "Network", "device_named", "left_to_tensors"]

BUFFERS = 1.5 * 2**30
"""The context of a device and the buffers of collectives: 1 to 2 GiB beside an allocator's figures."""
MARGIN = 0.05
"""The share of a device that is left to the allocator: reserved memory is more than what tensors take."""


def left_to_tensors(memory_bytes: float) -> float:
    """What tensors may take of a device's memory, beside ``BUFFERS`` and the ``MARGIN``; below 0 if that is all."""
    return memory_bytes * (1 - MARGIN) - BUFFERS


@dataclass(frozen=True)
class Network:
    """What ranks communicate over: links inside of a node, and links between nodes."""

    node_devices: int
    """The devices of a node."""
    bytes_per_second: float
    """What a device sends inside of a node, in one direction, while all communicate."""
    outer_bytes_per_second: float
    """What a device sends to other nodes, in one direction, by a link of its own."""
    latency_seconds: float
    """Of one hop inside of a node; ``outer_latency_seconds`` between nodes."""
    outer_latency_seconds: float
    start_seconds: float
    """Of any collective, however small."""
    source: str

    def seconds(self, kind: str, size: float, ranks: int, on_node: int) -> float:
        """Seconds of a collective by a ring, or straight to each rank (``all_to_all``, ``permute``).

        A ring has ``ranks - 1`` hops, one of them from node to node for each node but one, and passes on all bytes but
        those of one rank. It leaves a node by the links of its ranks there. An all-reduce goes round twice. Latency and
        bandwidth are added (Hockney, 1994; bytes and hops as Thakur, Rabenseifner and Gropp, 2005, have them).

        >>> network = device_named("h100").network
        >>> round(network.seconds("all_gather", size=134217728, ranks=8, on_node=8) * 1e6, 1)
        348.9

        Args:
            kind, size, ranks: as in :class:`~torchckpt.planning.work.block.Collective`.
            on_node: the ranks of the group in one node.
        """
        if ranks == 1:
            return 0.0
        away, nodes = ranks - on_node, -(-ranks // on_node)
        if kind in ("all_to_all", "permute"):
            hops = self.outer_latency_seconds if away else self.latency_seconds
            inner, outer = (on_node - 1, away) if kind == "all_to_all" else (ranks * (not away), ranks * (away > 0))
            moving = max(inner / self.bytes_per_second, outer / self.outer_bytes_per_second) * size / ranks
            return self.start_seconds + hops + moving
        hops = (ranks - nodes) * self.latency_seconds + (nodes - 1) * self.outer_latency_seconds
        speed = min(self.bytes_per_second, on_node * self.outer_bytes_per_second) if away else self.bytes_per_second
        share = 1.0 if kind == "broadcast" else (ranks - 1) / ranks
        return self.start_seconds + (2 if kind == "all_reduce" else 1) * (hops + share * size / speed)


@dataclass(frozen=True)
class Device:
    """Peak rates for dense arithmetic, memory and links. No real program reaches them."""

    name: str
    peak_flops: Mapping[str, float]
    """FLOPs per second, by data type: ``bfloat16``, ``float16``, ``tf32``, ``float32``, ``float64``."""
    bytes_per_second: float
    """Bandwidth of the device's memory."""
    link_bytes_per_second: float
    """Bandwidth to one neighbour in the same node, in one direction."""
    memory_bytes: float
    source: str
    network: Network | None = None
    """What collectives take. None: unknown, and stages that communicate cannot be counted."""

    def seconds(self, flops: float, moved_bytes: float, dtype: str, efficiency: float = 1.0) -> float:
        """Seconds of an operation: the larger of its compute time and its memory time (the roofline model of Williams
        et al., 2009).

        >>> device_named("h100").seconds(flops=989.4e9, moved_bytes=0, dtype="bfloat16", efficiency=0.5)
        0.002

        Args:
            efficiency: the share of peak FLOPs that is reached, above 0 and at most 1. Default: 1.
        """
        peak = self.peak_flops.get(dtype, self.peak_flops["float32"])
        return max(flops / (peak * efficiency), moved_bytes / self.bytes_per_second)


_ROWS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("devices.json").read_text(encoding="utf-8"))
DEVICES = {row["name"]: Device(**row | {"network": row["network"] and Network(**row["network"])}) for row in _ROWS}
"""The known devices, by name."""


@called("device_named()")
def device_named(name: str) -> Device:
    """The device of ``DEVICES`` with this name.

    Raises:
        ArgumentError: no device has this name.
    """
    device = DEVICES.get(name.lower()) if isinstance(name, str) else None
    if device is None:
        rule = f"the device is not one of {', '.join(DEVICES)}, or a Device"
        raise_fault(Fault(rule, f"device={name!r}", 'device="h100"'))
    return device
