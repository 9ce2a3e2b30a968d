"""Clock: when something happened on a device, without waiting for it."""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

__all__ = ["Clock", "Stamp"]

Stamp: TypeAlias = Any
"""On an accelerator an event in its current stream; on other devices seconds of ``time.perf_counter``."""


class Clock:
    """The clock of one device."""

    def __init__(self, device: torch.device) -> None:
        has_module = device.type not in ("cpu", "meta")
        module: Any = torch.get_device_module(device) if has_module else None
        self._module: Any = module if hasattr(module, "Event") else None
        self._device = device

    def stamp(self) -> Stamp:
        return time.perf_counter() if self._module is None else self._event()

    def reader(self) -> Callable[[Stamp], float]:
        """A function that turns the stamps made so far into seconds of ``time.perf_counter``. Waits for the device.

        The function counts back from now. Events give their distance as float32 milliseconds, which have too few digits
        for the time since the program began.
        """
        if self._module is None:
            return float
        self._module.synchronize(self._device)
        last, now = self._event(), time.perf_counter()
        last.synchronize()
        return lambda stamp: now - float(stamp.elapsed_time(last)) / 1e3

    def _event(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event
