"""Left behind: all that this library changes for a while, in a thread, in the process and on modules."""
from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook as any_global_hook

from torchckpt import is_checkpointing, is_recomputing
from torchckpt.regions.flags import local
from torchckpt.regions.private import dispatch_modes_are_active, function_modes, hooks_in_force

__all__ = ["module_state", "nothing_left_behind", "thread_state"]


def thread_state() -> dict[str, Any]:
    """All that a region changes for a while in its thread, and in the process."""
    return {
        "flags": (is_checkpointing(), is_recomputing()),
        "thread": (local.thread.flags, local.thread.scope, local.thread.norms, local.thread.tracing),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "hooks": hooks_in_force(True),
        "modes": (dispatch_modes_are_active(), len(function_modes())),
        "module hooks": any_global_hook(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "wrapper": torch.utils.checkpoint._VersionWrapper.__init__,
        "threads": sorted(one.name for one in threading.enumerate() if "torchckpt" in one.name),
    }


def module_state(modules: Iterable[nn.Module]) -> list[Any]:
    """The class, the attributes and the tables of each module: which keys, and of hooks, parameters and buffers which
    objects."""
    return [
        (type(one), sorted(vars(one)), {name: [*map(id, table.values())] for name, table in _tables(one)}, one.training)
        for module in modules
        for one in module.modules()
    ]


def _tables(module: nn.Module) -> Iterator[tuple[str, dict[Any, Any]]]:
    return ((name, value) for name, value in vars(module).items() if isinstance(value, dict))


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    before = thread_state()
    yield
    assert thread_state() == before
