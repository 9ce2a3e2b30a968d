"""A simulated accelerator for machines that have none: ``torch.device("sim:0")``. README.md says what it is.

>>> simulator = load()  # before the first backward of the process
>>> x = torch.randn(4, 4, device="sim:1")
"""
from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import time
from pathlib import Path
from typing import Any

import torch

from tests.device.build import MODULE, find_compiler, library
from tests.device.errors import BuildError, DeviceError, NoCompilerError, NotSupportedError
from tests.device.module import device_module
from tests.device.simulator import Counts, Ran, Rates, Simulator

__all__ = [
    "BuildError",
    "Counts",
    "DeviceError",
    "NoCompilerError",
    "NotSupportedError",
    "Ran",
    "Rates",
    "Simulator",
    "load",
    "why_not",
]

_loaded: dict[str, Simulator] = {}


def load(devices: int = 4) -> Simulator:
    """Make ``sim`` the accelerator of this process, with so many devices. Later calls return what the first one made.

    To be called before the first backward of the process: autograd starts a thread for each device then.

    Raises:
        DeviceError: there is no compiler, it failed, or this torch or this process cannot have the device.
    """
    if not _loaded:
        _loaded["sim"] = _start(_native(library()), devices)
    count = torch.accelerator.device_count()
    if count < devices:
        raise DeviceError(f"this process has {count} simulated devices, and not {devices}: load({devices}) first")
    return _loaded["sim"]


def why_not() -> str | None:
    """Why tests of the device are skipped on this machine: one line, or None."""
    if torch.cuda.is_available():  # torch would take the simulated device for the machine's accelerator
        return "this machine has CUDA; CUDA_VISIBLE_DEVICES= python -m pytest has the simulated device instead"
    try:
        find_compiler()
    except NoCompilerError as error:
        return str(error)
    return None


def _native(path: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_loader(MODULE, loader)
    assert spec is not None
    native = importlib.util.module_from_spec(spec)
    loader.exec_module(native)
    return native


def _start(native: Any, devices: int) -> Simulator:
    torch.utils.rename_privateuse1_backend("sim")
    native.start(devices)
    torch._register_device_module("sim", device_module(native))
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.random._fork_rng_warned_already = True  # that fork_rng asks many devices is no news here
    atexit.register(native.shut_down)
    _start_autograd(devices)
    return Simulator(native)


def _start_autograd(devices: int) -> None:
    # The engine makes a thread for each device that it knows at the first backward, whatever that is of.
    torch.ones(1, requires_grad=True).sum().backward()
    latest = time.monotonic() + 2
    while _autograd_threads() < devices and time.monotonic() < latest:
        time.sleep(0.001)  # a thread has its name a little later than its life
    if _autograd_threads() < devices:
        raise NotSupportedError(
            "autograd has no threads for the simulated devices, as a backward came before them: call "
            "tests.device.load() first, as tests/device/conftest.py does when it is imported"
        )


def _autograd_threads() -> int:
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("pt_autograd_") for name in names)
