"""The device is made before the first test: autograd makes its threads at the first backward of a process."""
from __future__ import annotations

from tests.device import load, why_not

if why_not() is None:
    load()
