"""The accelerator that tests run on: CUDA where there is one, the simulated device of ``tests/device`` elsewhere.

A test asks for it by a fixture: ``device`` (the CPU, then the accelerator), ``accelerator`` or ``two_accelerators``.
The last two need the mark ``accelerator``, which the first brings along.
"""
from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["TYPE", "block_bytes", "module_of", "random_states", "take_once"]

TYPE = "cuda" if torch.cuda.is_available() else "sim"


@functools.cache
def take_once() -> None:
    """On CUDA, have libraries take what they keep: a context, workspaces in this thread and in that of backwards."""
    if TYPE != "cuda":
        return
    layers = nn.Sequential(*(nn.Linear(16, 16, device=TYPE) for _ in range(2)))  # a replay runs all but the last one
    x = torch.randn(8, 16, device=TYPE, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cuBLAS says that it finds no context in a thread
        checkpoint(layers, x, use_reentrant=False).sum().backward()


def block_bytes(size: int) -> int:
    """What an allocation of ``size`` bytes takes: on CUDA, blocks of 512."""
    return -(-size // 512) * 512 if TYPE == "cuda" else size


def module_of(device: torch.device | str) -> Any:
    """``torch.cuda`` or ``torch.sim``."""
    return torch.get_device_module(device)


def random_states(device: torch.device) -> list[Tensor]:
    """Of the CPU's generator, and of all of the device's type."""
    own = [] if device.type == "cpu" else module_of(device).get_rng_state_all()
    return [torch.get_rng_state(), *own]
