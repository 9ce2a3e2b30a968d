"""Devices: what a benchmark runs on. ``sim`` is the simulated device of the tests, for a rehearsal without a GPU."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Pace", "chosen", "half", "module_of", "name_of", "seconds_of", "synchronize"]


def chosen(name: str, devices: int = 2) -> torch.device:
    """The device of that name; ``sim`` has so many. To be called before the first backward of the process."""
    if name == "sim":
        from tests.device import load

        load(devices)
    return torch.device(name)


def module_of(device: torch.device | None = None) -> Any:
    """``torch.cuda`` and its like; by default that of the machine's accelerator."""
    return torch.get_device_module(device)


def name_of(device: torch.device) -> str:
    return str(module_of(device).get_device_name(device))


def half(device: torch.device) -> torch.dtype:
    """bfloat16; the simulated device has no layer norm of it."""
    return torch.float32 if device.type == "sim" else torch.bfloat16


def synchronize() -> None:
    """Wait for all accelerators, where there are any."""
    if torch.accelerator.is_available():
        for device in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(device)


def seconds_of(call: Callable[[], Any]) -> float:
    """By the clock of the current accelerator, with nothing else there."""
    module = module_of()
    module.synchronize()
    begin, end = (module.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


class Pace:
    """Pauses of a stream, in seconds."""

    def __init__(self, cycles: int = 50_000_000) -> None:
        self._sleep = module_of()._sleep  # of torch.cuda, without a public name; torch.sim has it for our tests
        self._cycles_a_second = cycles / min(seconds_of(lambda: self._sleep(cycles)) for _ in range(5))

    def pause(self, seconds: float) -> None:
        """On the current stream."""
        if seconds > 0:
            self._sleep(int(seconds * self._cycles_a_second))
