"""Clock: when something happened on a device, without waiting for it."""
from __future__ import annotations

import time
from typing import Any, TypeAlias

import torch

__all__ = ["Clock", "Stamp"]

Stamp: TypeAlias = Any
"""Seconds on the CPU; on an accelerator an event in its current stream."""


class Clock:
    """Of one device. Seconds are those of ``time.perf_counter``, on accelerators too."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._device = device
        self._zero: tuple[Any, float] | None = None

    def stamp(self) -> Stamp:
        if self._module is None:
            return time.perf_counter()
        if self._zero is None:
            self._module.synchronize(self._device)
            self._zero = self._event(), time.perf_counter()
        return self._event()

    def seconds(self, stamp: Stamp) -> float:
        """Of a stamp; waits for the device to get there."""
        if self._module is None or self._zero is None:
            return float(stamp)
        event, zero = self._zero
        stamp.synchronize()
        return zero + float(event.elapsed_time(stamp)) / 1e3

    def _event(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event
