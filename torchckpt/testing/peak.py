"""Peak: the most bytes that a step takes above what was there before it."""
from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from torchckpt.errors import Fault, called, check, kind
from torchckpt.planning import Action, Kind

__all__ = ["peak_bytes"]

_STEP = Action(0, Kind.FORWARD, 0)


@called("peak_bytes()")
def peak_bytes(step: Callable[[], object], device: torch.device | str | None = None) -> int:
    """Run ``step()``, and return the most bytes that it took at once above what was there before it.

    On an accelerator its allocator counts. On the CPU the storages count that operators make, while they are alive, in
    this thread and the backwards that it starts. Compiled code runs as eager code there, an operation's workspace is
    not seen, and what the step frees of older tensors is not taken off.

    >>> peak_bytes(lambda: model(x).sum().backward())

    Args:
        step: a forward and its backward, or anything else. Call it once before, if later steps matter: the first one
            makes the gradients of the parameters and the state of the optimizer.
        device: what to count on. Default: the current accelerator if this process has memory there, otherwise the CPU.

    Raises:
        ArgumentError: ``step`` is not callable.
    """
    fault = Fault("the step is not callable", kind(step), "peak_bytes(lambda: model(x).sum().backward())")
    check([] if callable(step) else [fault])
    from torchckpt.distributed.budget.live_bytes import LiveBytes  # late: torch.distributed is slow to import

    where = _device_in_use() if device is None else torch.device(device)
    gc.collect()  # the step would free it
    live = LiveBytes(where, looks=where.type in ("cpu", "meta"))
    with live.entered():
        live.reaches(_STEP)
        step()
    return int(live.levels[_STEP].highest)


def _device_in_use() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and torch.get_device_module(accelerator).memory_allocated():
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
