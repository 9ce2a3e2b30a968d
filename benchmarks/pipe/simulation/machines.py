"""Machines: peak rates of GPUs and their links, and the slower rates of the simulated devices that stand for them.

The simulated model is smaller in each of its lengths (tokens, width, vocabulary) by ``SHRINK``. So its operators have
``SHRINK ** 3`` times fewer FLOPs, and read and write ``SHRINK ** 2`` times fewer bytes; the rates are divided by the
same, and what takes how long beside what is that of the large model. All of it is slower by ``stretch``. The small
model is of float32, the large one of bf16, whose bytes are half as many.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from tests.device import Rates

__all__ = ["H100", "LAPTOP", "SHRINK", "Machine"]

SHRINK = 128
BYTES = SHRINK**2 / 2  # bytes of the large model for each byte of the small one


@dataclass(frozen=True)
class Machine:
    """Peak rates from the vendors' data sheets."""

    name: str
    flops_per_second: float  # bf16, dense
    bytes_per_second: float  # of its memory
    link_bytes_per_second: float  # to a neighbour, each way
    seconds_per_operator: float
    seconds_per_copy: float

    def rates(self, stretch: float) -> Rates:
        """The rates of a simulated device, on which everything takes ``stretch`` times as long."""
        return Rates(
            self.flops_per_second / SHRINK**3 / stretch,
            self.bytes_per_second / BYTES / stretch,
            self.seconds_per_operator * stretch,
            self.link_bytes_per_second / BYTES / stretch,
            self.seconds_per_copy * stretch,
        )

    def with_link(self, copy_seconds: float, copy_bytes: float) -> Machine:
        """The same, with a link that such a copy of the small model takes so long on: unstretched seconds."""
        bandwidth = copy_bytes * BYTES / copy_seconds
        return replace(self, link_bytes_per_second=bandwidth, seconds_per_copy=0.0)


H100 = Machine("H100 SXM, NVLink", 989e12, 3.35e12, 450e9, 3e-6, 10e-6)
LAPTOP = Machine("RTX 4060 Laptop, PCIe 4.0 x8", 29e12, 256e9, 16e9, 5e-6, 20e-6)
