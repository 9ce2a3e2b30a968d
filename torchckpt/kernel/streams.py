"""Streams of any accelerator, through ``torch.Stream`` and ``torch.accelerator``: who waits for whom."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchckpt.kernel.ambient import accelerator_type

__all__ = ["Trail", "accelerators_among"]


def accelerators_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.device, ...]:
    """The accelerators that tensors among the arguments lie on, or else the current one, if one was used at all."""
    kind = accelerator_type()
    if kind is None:
        return ()
    leaves = pytree.tree_leaves((args, kwargs))
    found = dict.fromkeys(leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type == kind)
    if found or not _is_initialized(kind):
        return tuple(found)
    return (torch.device(kind, torch.accelerator.current_device_index()),)


def _is_initialized(kind: str) -> bool:
    ask: Callable[[], bool] | None = getattr(getattr(torch, kind, None), "is_initialized", None)
    return ask is None or ask()


class Trail:
    """A point in the work of the streams that were current when it was made, for work on other streams to wait for."""

    __slots__ = ("_marks",)

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        streams = [torch.accelerator.current_stream(device) for device in devices]
        self._marks = [(stream, stream.record_event()) for stream in streams]

    def followed(self, tensors: Iterable[Tensor]) -> None:
        """Let the current streams wait for that point, and keep the memory of ``tensors`` until they are done with it.

        Nothing happens where the current stream is the one that did the work: its order is the waiting.
        """
        for stream, event in self._marks:
            current = torch.accelerator.current_stream(stream.device)
            if current != stream:
                current.wait_event(event)
                for tensor in tensors:
                    if tensor.device == stream.device:
                        tensor.record_stream(current)
