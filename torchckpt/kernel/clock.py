"""Clock: when something happened on a device, without waiting for it."""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

__all__ = ["Clock", "Stamp"]

Stamp: TypeAlias = Any
"""An event in the current stream of an accelerator; elsewhere seconds."""


class Clock:
    """Of one device."""

    def __init__(self, device: torch.device) -> None:
        has_module = device.type not in ("cpu", "meta")
        module: Any = torch.get_device_module(device) if has_module else None
        self._module: Any = module if hasattr(module, "Event") else None
        self._device = device

    def stamp(self) -> Stamp:
        return time.perf_counter() if self._module is None else self._event()

    def reader(self) -> Callable[[Stamp], float]:
        """What turns the stamps made so far into seconds of ``time.perf_counter``. Waits for the device.

        They are counted back from now: an event tells milliseconds in single precision, too few digits for those since
        the program began.
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
