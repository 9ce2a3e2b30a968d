"""Streams: how work on one stream of an accelerator waits for work on another (``torch.Stream``, any accelerator)."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torchckpt.regions.state.ambient import accelerator_type
from torchckpt.tensors import tensors_in

__all__ = ["SyncPoint", "accelerators_among"]


def accelerators_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.device, ...]:
    """The accelerators of the tensors among the arguments. If there are none: the current one, if it is initialized."""
    kind = accelerator_type()
    if kind is None:
        return ()
    found = dict.fromkeys(tensor.device for tensor in tensors_in((args, kwargs)) if tensor.device.type == kind)
    if found or not _is_initialized(kind):
        return tuple(found)
    return (torch.device(kind, torch.accelerator.current_device_index()),)


def _is_initialized(kind: str) -> bool:
    ask: Callable[[], bool] | None = getattr(getattr(torch, kind, None), "is_initialized", None)
    return ask is None or ask()


class SyncPoint:
    """An event on each stream that is current when it is made. Work on other streams can wait for the events."""

    __slots__ = ("_marks",)

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        streams = [torch.accelerator.current_stream(device) for device in devices]
        self._marks = [(stream, stream.record_event()) for stream in streams]

    def wait_before_using(self, tensors: Iterable[Tensor]) -> None:
        """Make the current streams wait for the events, and keep the memory of ``tensors`` until they are done with it.

        A stream that recorded the event itself needs no wait: it runs its work in order.
        """
        for stream, event in self._marks:
            current = torch.accelerator.current_stream(stream.device)
            if current != stream:
                current.wait_event(event)
                for tensor in tensors:
                    if tensor.device == stream.device:
                        tensor.record_stream(current)
