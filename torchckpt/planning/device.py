"""Device: the peak FLOPs and bytes per second of an accelerator, from its data sheet."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchckpt.errors import Fault, called, raise_fault

__all__ = ["DEVICES", "Device", "device_named"]


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


def _peaks(half: float, tf32: float, single: float, double: float) -> dict[str, float]:
    """Peak FLOPs per second from peaks in TFLOPS. All but float32 are those of the matrix units."""
    named = {"bfloat16": half, "float16": half, "tf32": tf32, "float32": single, "float64": double}
    return {dtype: value * 1e12 for dtype, value in named.items()}


DEVICES = {
    device.name: device
    for device in (
        Device(
            "a100", _peaks(312, 156, 19.5, 19.5), 2.039e12, 300e9, 80e9,
            "NVIDIA A100 Tensor Core GPU, data sheet (A100 80GB SXM; NVLink 600 GB/s of both directions)",
        ),
        Device(
            "h100", _peaks(989.4, 494.7, 66.9, 66.9), 3.35e12, 450e9, 80e9,
            "NVIDIA H100 Tensor Core GPU, data sheet and architecture white paper (H100 SXM5, without sparsity; NVLink "
            "900 GB/s of both directions)",
        ),
        Device(
            "h200", _peaks(989.4, 494.7, 66.9, 66.9), 4.8e12, 450e9, 141e9,
            "NVIDIA H200 Tensor Core GPU, data sheet (H200 SXM, without sparsity; NVLink 900 GB/s of both directions)",
        ),
        Device(
            "b200", _peaks(2250, 1100, 80, 40), 8e12, 900e9, 180e9,
            "NVIDIA Blackwell Architecture Technical Brief and DGX B200 data sheet (HGX B200 at 1000 W, without "
            "sparsity; NVLink 1.8 TB/s of both directions; 1,440 GB of eight)",
        ),
        Device(
            "mi300x", _peaks(1307.4, 653.7, 163.4, 163.4), 5.3e12, 64e9, 192e9,
            "AMD Instinct MI300X Accelerator, data sheet (without sparsity; one Infinity Fabric link to each "
            "neighbour, 128 GB/s of both directions)",
        ),
    )
}  # fmt: skip
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
