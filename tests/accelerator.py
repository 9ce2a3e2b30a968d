"""The accelerator that tests run on: CUDA where there is one, the simulated device of ``tests/device`` elsewhere.

A test asks for it by a fixture: ``device`` (the CPU, then the accelerator), ``accelerator`` or ``two_accelerators``.
The last two need the mark ``accelerator``, which the first brings along.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["TYPE", "module_of", "random_states"]

TYPE = "cuda" if torch.cuda.is_available() else "sim"


def module_of(device: torch.device | str) -> Any:
    """``torch.cuda`` or ``torch.sim``."""
    return torch.get_device_module(device)


def random_states(device: torch.device) -> list[Tensor]:
    """Of the CPU's generator, and of all of the device's type."""
    own = [] if device.type == "cpu" else module_of(device).get_rng_state_all()
    return [torch.get_rng_state(), *own]
