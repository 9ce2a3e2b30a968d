"""Devices: the accelerators that a call works on, how streams wait for each other, and when something happened.

A stream is a ``torch.Stream``, of any accelerator.
"""
from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchckpt.tensors import tensors_in

__all__ = [
    "Clock", "Stamp", "SyncPoint", "accelerator_type", "accelerators_among", "accelerators_of",
    "current_accelerators", "mark", "on", "wait_for",
]


@functools.cache
def accelerator_type() -> str | None:
    """The type of this machine's accelerator, such as ``"cuda"``; None where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type


def accelerators_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.device, ...]:
    """The accelerators of the tensors among the arguments."""
    kind = accelerator_type()
    if kind is None:
        return ()
    return tuple(dict.fromkeys(tensor.device for tensor in tensors_in((args, kwargs)) if tensor.device.type == kind))


def current_accelerators() -> tuple[torch.device, ...]:
    """The accelerator that is current; none where it is not initialized, so that nothing can run on it."""
    kind = accelerator_type()
    if kind is None:
        return ()
    is_initialized: Callable[[], bool] = getattr(getattr(torch, kind, None), "is_initialized", lambda: True)
    return (torch.device(kind, torch.accelerator.current_device_index()),) if is_initialized() else ()


def accelerators_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.device, ...]:
    """The accelerators of the tensors among the arguments. If there are none: the current one, if it is initialized."""
    return accelerators_of(args, kwargs) or current_accelerators()


def on(stream: torch.Stream | None) -> AbstractContextManager[None]:
    """Inside the block, ``stream`` is current, and so is its device."""
    return nullcontext() if stream is None else _on(stream)


@contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    # Entering a stream that is already current on its device does not select the device.
    with torch.accelerator.device_index(stream.device_index), stream:
        yield


def mark(stream: torch.Stream | None) -> torch.Event | None:
    """The end of what ``stream`` has to do so far. A device without streams has done it."""
    return None if stream is None else stream.record_event()


def wait_for(stream: torch.Stream | None, event: torch.Event | None) -> None:
    """Let ``stream`` wait for ``event``; nothing, if one of them is none."""
    if stream is not None and event is not None:
        stream.wait_event(event)


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


Stamp: TypeAlias = Any
"""On an accelerator an event in its current stream; on other devices seconds of ``time.perf_counter``."""


class Clock:
    """The clock of one device. It tells when something happened there, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        has_module = device.type not in ("cpu", "meta")
        module: Any = torch.get_device_module(device) if has_module else None
        self._module: Any = module if hasattr(module, "Event") else None
        self._device = device

    def stamp(self, stream: torch.Stream | None = None) -> Stamp:
        """Note now, as ``stream`` comes to it. Default: the current one."""
        return time.perf_counter() if self._module is None else self._event(stream)

    def reader(self) -> Callable[[Stamp], float]:
        """A function that turns the stamps made so far into seconds of ``time.perf_counter``. Waits for the device.

        The function counts back from now. Events give their distance as float32 milliseconds, which have too few digits
        for the time since the program began.
        """
        if self._module is None:
            return float
        self._module.synchronize(self._device)
        last, now = self._event(), time.perf_counter()
        last.synchronize()
        return lambda stamp: now - float(stamp.elapsed_time(last)) / 1e3

    def _event(self, stream: torch.Stream | None = None) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(stream or self._module.current_stream(self._device))
        return event
