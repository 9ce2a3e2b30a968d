"""Rates: the share of a data sheet's peaks that operations reach, by device and size, and the seconds of collectives."""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from torchckpt.planning.device import DEVICES, Device

__all__ = ["MACHINES", "RATES", "Machine", "Product", "Rates"]


@dataclass(frozen=True)
class Rates:
    """What a device reaches of its peaks."""

    product: float
    """Large matrix products, of the peak FLOPs."""
    attention: Mapping[str, tuple[float, float]]
    """By kernel, of the peak FLOPs, on long sequences with a causal mask: forward, backward."""
    units: int
    """Multiprocessors, which share the tiles of a product."""
    network: float
    """Bytes per second between nodes of one GPU, in one direction."""
    inner: float = 224.0
    """The inner dimension at which a product reaches half of its rate."""
    memory: float = 0.763
    """Memory-bound kernels, of the memory's bandwidth."""
    kernel_seconds: float = 3e-6
    """What a kernel loses on the device at its start and end."""
    host_seconds: float = 29.5e-6
    """What the host needs for one kernel of eager mode."""
    link: float = 0.758
    """Collectives, of the bandwidth of links."""
    unhidden: float = 0.257
    """The share of an overlapped collective that is paid all the same: it takes multiprocessors and bandwidth."""


_AMPERE = {"flash1": (0.40, 0.32), "flash2": (0.65, 0.53), "fused": (0.65, 0.53)}
_HOPPER = {"flash1": (0.22, 0.165), "flash2": (0.36, 0.30), "fused": (0.62, 0.50)}
_HALF_LENGTH = 512
"""The sequence at which a kernel of attention reaches half of its rate."""

RATES = {
    "a100": Rates(0.767, _AMPERE, 108, 25e9),
    "h100": Rates(0.599, _HOPPER, 132, 50e9),
    "h200": Rates(0.599, _HOPPER, 132, 50e9),
    "b200": Rates(0.599, _HOPPER, 148, 50e9),
    "mi300x": Rates(0.4, _HOPPER, 304, 50e9),
}


class Product(NamedTuple):
    """``count`` matrix products of ``rows x inner`` by ``inner x columns``."""

    rows: float
    columns: float
    inner: float
    count: float = 1.0

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.columns * self.inner * self.count

    @property
    def moved(self) -> float:
        """Bytes in half precision."""
        rows, columns, inner, count = self
        return 2.0 * count * (rows * inner + inner * columns + rows * columns)

    @property
    def input_grad(self) -> Product:
        return Product(self.rows, self.inner, self.columns, self.count)

    @property
    def weight_grad(self) -> Product:
        return Product(self.columns, self.inner, self.rows, self.count)


_TILES = ((256, 128, 1.0), (128, 128, 0.95), (64, 128, 0.8), (64, 64, 0.65))
"""The tiles of a product, and their rate: smaller ones read more."""
_FP8 = 1.6
"""The rate of products in fp8, with the casts before them, relative to bf16."""


def _filled(exact: float, waves: int) -> float:
    """The rate of a product in whole waves of tiles. Half of what the last wave leaves idle is won back: libraries split
    the inner dimension of the last tiles (stream-K: Osama et al. 2023, arXiv:2301.03598)."""
    return exact / (0.5 * exact + 0.5 * waves)


@dataclass(frozen=True)
class Machine:
    """Devices in nodes."""

    device: Device
    rates: Rates
    node: int = 8
    fp8: bool = False

    def product(self, work: Product) -> float:
        """Seconds of a product: whole tiles, in whole waves over the multiprocessors."""
        rows, columns, inner, count = work
        units = self.rates.units
        tiles = ((rate, rows / x, columns / y) for x, y, rate in _TILES)
        whole = max(
            rate * _filled(down * across * count / units, ceil(ceil(down) * ceil(across) * count / units))
            for rate, down, across in tiles
        )
        reached = self.peak * self.rates.product * whole * inner / (inner + self.rates.inner)
        return max(work.flops / (reached * (_FP8 if self.fp8 else 1)), self.stream(work.moved)) + self.kernel

    @property
    def peak(self) -> float:
        return self.device.peak_flops["bfloat16"]

    @property
    def kernel(self) -> float:
        return self.rates.kernel_seconds

    def stream(self, moved_bytes: float) -> float:
        """Seconds of a memory-bound operation."""
        return moved_bytes / (self.device.bytes_per_second * self.rates.memory)

    def attention(self, flops: float, kernel: str, sequence: int) -> tuple[float, float]:
        """Seconds of a forward of so many FLOPs, and of its backward, which makes the scores again: 5 products for 2."""
        forward, backward = self.rates.attention[kernel]
        reached = self.peak * sequence / (sequence + _HALF_LENGTH)
        return flops / (reached * forward), 2.5 * flops / (reached * backward)

    def collective(self, size: float, ranks: int, stride: int = 1, *, reduces_all: bool = False) -> float:
        """Seconds of an all-gather, reduce-scatter or all-to-all of ``size`` bytes, or of an all-reduce: rings whose
        ranks lie ``stride`` apart. Between nodes they use the networks of all ranks of the group in a node."""
        if ranks <= 1:
            return 0.0
        nodes = ceil(ranks * stride / self.node)
        inside = self.device.link_bytes_per_second
        wire = inside if nodes == 1 else min(inside, max(1, self.node // stride) * self.rates.network)
        times = 2 if reduces_all else 1
        latency = 10e-6 + 4e-6 * math.log2(ranks) + 8e-6 * math.log2(nodes)
        return times * ((ranks - 1) / ranks * size / (wire * self.rates.link) + latency)

    def message(self, size: float, *, across: bool = False) -> float:
        """Seconds of a message between two ranks, in one node or ``across`` two."""
        wire = self.rates.network if across else self.device.link_bytes_per_second
        return size / (wire * self.rates.link) + 15e-6


MACHINES = {name: Machine(DEVICES[name], rates) for name, rates in RATES.items()}
"""The known devices, in nodes of eight, each with a network of its own."""
