"""Devices: the devices that a benchmark runs on. ``sim`` is the tests' simulated device, to rehearse without a GPU."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Pace", "chosen", "half", "module_of", "name_of", "seconds_of", "synchronize"]


def chosen(name: str, devices: int = 2) -> torch.device:
    """The device with this name; ``sim`` has ``devices`` devices. Call it before the first backward of the process."""
    if name == "sim":
        from tests.device import load

        load(devices)
    return torch.device(name)


def module_of(device: torch.device | None = None) -> Any:
    """The torch module of a device type, such as ``torch.cuda``; by default that of the machine's accelerator."""
    return torch.get_device_module(device)


def name_of(device: torch.device) -> str:
    return str(module_of(device).get_device_name(device))


def half(device: torch.device) -> torch.dtype:
    """bfloat16; float32 on the simulated device, which has no layer norm in bfloat16."""
    return torch.float32 if device.type == "sim" else torch.bfloat16


def synchronize() -> None:
    """Wait for all accelerators, if there are any."""
    if torch.accelerator.is_available():
        for device in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(device)


def seconds_of(call: Callable[[], Any]) -> float:
    """Seconds of ``call()`` by the clock of the current accelerator, which does nothing else meanwhile."""
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
        """Pause the current stream."""
        if seconds > 0:
            self._sleep(int(seconds * self._cycles_a_second))
