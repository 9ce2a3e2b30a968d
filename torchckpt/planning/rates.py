"""Rates: the share of a data sheet's peaks that operations reach, by device and size."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from torchckpt.errors import Fault, called, raise_fault
from torchckpt.planning.device import DEVICES, Device, Network, device_named
from torchckpt.planning.work.block import Collective

__all__ = ["MACHINES", "RATES", "Machine", "Product", "Rates", "machine_named"]


@dataclass(frozen=True)
class Rates:
    """What a device reaches of its peaks."""

    product: float
    """Large matrix products, of the peak FLOPs."""
    attention: Mapping[str, tuple[float, float]]
    """By kernel, of the peak FLOPs, on long sequences with a causal mask: forward, backward."""
    units: int
    """Multiprocessors, which share the tiles of a product."""
    inner: float = 228.0
    """The inner dimension at which a product reaches half of its rate."""
    memory: float = 0.744
    """Memory-bound kernels, of the memory's bandwidth."""
    kernel_seconds: float = 3e-6
    """What a kernel loses on the device at its start and end. Not fitted."""
    host_seconds: float = 29.8e-6
    """What the host needs for one kernel of eager mode."""
    unhidden: float = 0.292
    """The share of an overlapped collective that is paid all the same: it takes multiprocessors and bandwidth."""


# FlashAttention 1 to 3 (Dao et al. 2022 and 2023, Shah et al. 2024: arXiv:2205.14135, 2307.08691, 2407.08608), figures
# of speed with a head of 128 and a causal mask, over the data sheet's peak; flash1 as the series of llm-foundry has it.
_AMPERE = {"flash1": (0.40, 0.32), "flash2": (0.65, 0.53), "fused": (0.65, 0.53)}
_HOPPER = {"flash1": (0.22, 0.165), "flash2": (0.36, 0.30), "fused": (0.62, 0.50)}
_HALF_LENGTH = 512
"""The sequence at which a kernel of attention reaches half of its rate."""

RATES = {
    "a100": Rates(0.766, _AMPERE, 108),
    "h100": Rates(0.601, _HOPPER, 132),
    "h200": Rates(0.601, _HOPPER, 132),
    "b200": Rates(0.601, _HOPPER, 148),
    "mi300x": Rates(0.4, _HOPPER, 304),
}
"""By name of a device. The shares of products, memory, host and overlap are those of ``benchmarks/published/fit.py``,
one fit on all series of docs/accuracy.md; those of a B200 and an MI300X are of no fit: their few rows are in none."""


class Product(NamedTuple):
    """``many`` matrix products of ``rows x inner`` by ``inner x columns``."""

    rows: float
    columns: float
    inner: float
    many: float = 1.0

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.columns * self.inner * self.many

    @property
    def elements(self) -> float:
        """Those of both factors and of the product."""
        rows, columns, inner, many = self
        return many * (rows * inner + inner * columns + rows * columns)

    @property
    def input_grad(self) -> Product:
        return Product(self.rows, self.inner, self.columns, self.many)

    @property
    def weight_grad(self) -> Product:
        return Product(self.columns, self.inner, self.rows, self.many)


_TILES = ((256, 128, 1.0), (128, 128, 0.95), (64, 128, 0.8), (64, 64, 0.65))
"""The tiles of a product, and their rate: smaller ones read more."""
_LEAST_PART = 512
"""The least part of an inner dimension that is split."""
_HALF = "bfloat16"
_FP8 = 1.6
"""The rate of products in fp8, with the casts before them, relative to bf16."""


def _filled(exact: float, waves: int) -> float:
    """The rate of a product in whole waves of tiles. Libraries win back half of what the last wave leaves idle: they
    split the inner dimension of its tiles (stream-K: Osama et al. 2023, arXiv:2301.03598)."""
    return exact / (0.5 * exact + 0.5 * waves)


@dataclass(frozen=True)
class Machine:
    """Devices in nodes."""

    device: Device
    rates: Rates
    fp8: bool = False

    def product(self, work: Product, dtype: str = _HALF, moved_bytes: float | None = None) -> float:
        """Seconds of a product: whole tiles, in whole waves over the multiprocessors.

        Args:
            moved_bytes: default: those of half precision.
        """
        whole = max(rate * self._share(work, *size) for *size, rate in _TILES)
        reached = self._peak(dtype) * self.rates.product * whole
        moved = 2 * work.elements if moved_bytes is None else moved_bytes
        seconds = max(work.flops / (reached * (_FP8 if self.fp8 else 1)), self.stream(moved))
        return seconds + self.rates.kernel_seconds

    def _share(self, work: Product, height: int, width: int) -> float:
        """The share of the multiprocessors that compute, at the rate of the inner dimension. Where tiles are few, that
        is split."""
        down, across, units = work.rows / height, work.columns / width, self.rates.units
        tiles = ceil(down) * ceil(across) * work.many
        parts = max(1, min(units // tiles, work.inner // _LEAST_PART))
        inner = work.inner / parts
        filled = _filled(down * across * work.many * parts / units, ceil(tiles * parts / units))
        return filled * inner / (inner + self.rates.inner)

    def operation(self, flops: float, moved_bytes: float, dtype: str) -> float:
        """Seconds of an operation of no known kind: a convolution, or what is bound by memory."""
        computed = flops / (self._peak(dtype) * self.rates.product)
        return max(computed, self.stream(moved_bytes)) + self.rates.kernel_seconds

    @property
    def network(self) -> Network:
        if self.device.network is None:
            rule, works = "the device has no network, which says what collectives take", 'device="h100"'
            raise_fault(Fault(rule, f"device={self.device.name!r}", works))
        return self.device.network

    @property
    def peak(self) -> float:
        if "bfloat16" not in self.device.peak_flops:
            rule, works = "the device has no peak of bfloat16, which it computes in", 'peak_flops={"bfloat16": 989e12}'
            raise_fault(Fault(rule, f"device={self.device.name!r}, with {', '.join(self.device.peak_flops)}", works))
        return self.device.peak_flops["bfloat16"]

    def _peak(self, dtype: str) -> float:
        return self.peak if dtype == _HALF else self.device.peak_flops.get(dtype, self.device.peak_flops["float32"])

    def stream(self, moved_bytes: float) -> float:
        """Seconds of a memory-bound operation."""
        return moved_bytes / (self.device.bytes_per_second * self.rates.memory)

    def attention(self, flops: float, kernel: str, sequence: int, dtype: str = _HALF) -> tuple[float, float]:
        """Seconds of a forward of so many FLOPs, and of its backward: five products in place of two, as it makes the
        scores again."""
        forward, backward = self.rates.attention[kernel]
        reached = self._peak(dtype) * sequence / (sequence + _HALF_LENGTH)
        return flops / (reached * forward), 2.5 * flops / (reached * backward)

    def beside_host(self, seconds: float, kernels: float) -> float:
        """Seconds of kernels that a host starts: those of the slower of both, and a quarter more where they are equal,
        as one kernel waits for the host and the next for the device."""
        return float((seconds**3 + (self.rates.host_seconds * kernels) ** 3) ** (1 / 3))

    def overlapped(self, compute: float, communication: float) -> float:
        """Seconds of both side by side."""
        return max(compute, communication) + self.rates.unhidden * min(compute, communication)

    def collective(self, each: Collective, stride: int = 1) -> float:
        """Seconds of a collective, as often as it occurs, over ranks that lie ``stride`` apart."""
        on_node = min(each.ranks, max(1, self.network.node_devices // stride))
        return each.count * self.network.seconds(each.kind, each.bytes, each.ranks, on_node)


MACHINES = {name: Machine(DEVICES[name], rates) for name, rates in RATES.items()}
"""The known devices."""


@called("machine_named()")
def machine_named(name: str) -> Machine:
    """The device of this name, with what it reaches of its peaks.

    Raises:
        ArgumentError: it is not known, or what it reaches is not.
    """
    device = device_named(name)
    if device.name not in MACHINES:
        rule = f"what the device reaches of its peaks is not known; it is of {', '.join(MACHINES)}"
        raise_fault(Fault(rule, f"device={name!r}", 'device="h100"'))
    return MACHINES[device.name]
