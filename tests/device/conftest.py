"""The device is made before the first test: autograd makes its threads at the first backward of a process."""
from __future__ import annotations

from tests.device import load, why_not
from tests.device.fixtures import sim, simulator

__all__ = ["sim", "simulator"]

if why_not() is None:
    load()
