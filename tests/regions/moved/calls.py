"""Three ways to make a region that moves, of tensors of any size, and the CPU as a device whose tensors move."""
from __future__ import annotations

import torch

from tests.accelerator import TYPE
from torchckpt import offload
from torchckpt.regions.moved import region, slot
from torchckpt.regions.moved.region import Moved

__all__ = ["ahead", "by_default", "let_cpu_move", "moved", "sizes"]


def by_default(function, *args, **kwargs):
    """Sent, and let go of when the next region but one begins."""
    return offload(function, *args, min_bytes=1, **kwargs)


def moved(function, *args, **kwargs):
    """On the host before its backward, which has to fetch it."""
    return driven(("release",), function, *args, **kwargs)


def ahead(function, *args, **kwargs):
    """On the host, and fetched before its backward."""
    return driven(("release", "issue"), function, *args, **kwargs)


def driven(actions, function, *args, **kwargs):
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    one = Moved(1)
    outputs = one.forward(function, args, kwargs)
    for action in actions:
        getattr(one, action)()
    return outputs


def sizes(region) -> list[int]:
    """The bytes of the storages that may move, in the order in which they were saved."""
    return [storage.size for storage in region._moving()]


def let_cpu_move(monkeypatch) -> None:
    """Let tensors of the CPU go to another buffer of the CPU. That tests all but streams."""
    for module in (region, slot):
        monkeypatch.setattr(module, "goes_from", lambda device: device.type in ("cpu", TYPE))
