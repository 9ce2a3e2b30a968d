"""Ambient state: what a call reads from its thread, and a replay must find again.

Two parts. The *settings* (default device and dtype, autocast) are compared first and entered only where they differ
from those of the replay's thread. The *random numbers* are the states of the generators, put back after the replay.
"""
from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import TypeAlias

from torchckpt.kernel.private import modes_are_active

__all__ = ["Generator", "RandomState", "Settings", "accelerator_type", "entered", "generators_of", "settings"]


@functools.cache
def accelerator_type() -> str | None:
    """The type of this machine's accelerator, such as ``"cuda"``; None where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type


# settings -----------------------------------------------------------------------------------------------------------


Settings: TypeAlias = tuple[
    torch.dtype | None,  # autocast's dtype on the CPU; None: off
    torch.dtype | None,  # and on the accelerator
    bool,  # autocast's cache of weights
    torch.dtype,  # the default dtype
    torch.device | None,  # the default device; None: never set
    bool,  # inference mode
]


def settings() -> Settings:
    """Those of this thread, now."""
    accelerator = accelerator_type()
    return (
        _autocast("cpu"),
        _autocast(accelerator) if accelerator else None,
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device() if modes_are_active() else None,
        torch.is_inference_mode_enabled(),
    )


def entered(then: Settings) -> AbstractContextManager[Any] | None:
    """A context manager that brings ``then`` back; None if these settings hold already, the usual case."""
    now = settings()
    return None if now == then else _differing(then, now)


def _differing(then: Settings, now: Settings) -> ExitStack:
    cpu, accelerator, cache, dtype, device, inference = then
    stack = ExitStack()
    if inference != now[5]:
        stack.enter_context(torch.inference_mode(inference))
    if dtype != now[3]:
        stack.enter_context(_default_dtype(dtype))
    if device != now[4]:
        stack.enter_context(device or torch.device("cpu"))
    for device_type, autocast, before in (("cpu", cpu, now[0]), (accelerator_type(), accelerator, now[1])):
        if device_type and (autocast, cache) != (before, now[2]):
            stack.enter_context(torch.autocast(device_type, autocast, enabled=autocast is not None, cache_enabled=cache))
    return stack


def _autocast(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# random numbers -----------------------------------------------------------------------------------------------------


class Generator(Protocol):
    """What is asked of a generator: :class:`torch.Generator` has it."""

    def get_state(self) -> Tensor: ...
    def set_state(self, state: Tensor, /) -> Any: ...


_CPU = (torch.default_generator,)


class _ModuleGenerator:
    # The generator of a device whose module has functions for it, but no ``default_generators``.
    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = () if device.type == "mps" else (device,)  # there is one MPS device, and no argument for it

    def get_state(self) -> Tensor:
        state: Tensor = self._module.get_rng_state(*self._device)
        return state

    def set_state(self, state: Tensor, /) -> None:
        self._module.set_rng_state(state, *self._device)


def _device_generator(device: torch.device) -> Generator:
    generators = getattr(torch.get_device_module(device), "default_generators", ())
    generator: Generator = generators[device.index] if len(generators) > (device.index or 0) else _ModuleGenerator(device)
    return generator


def generators_of(devices: Sequence[torch.device], named: Sequence[Generator]) -> Sequence[Generator]:
    """The CPU's default generator, that of each of ``devices`` (accelerators), and those that the caller ``named``."""
    if not devices and not named:
        return _CPU
    return (torch.default_generator, *map(_device_generator, devices), *named)


_state = operator.methodcaller("get_state")


class RandomState:
    """The states of ``generators`` when this is made, to be put back for a while: between ``replay`` and ``resume``."""

    __slots__ = ("_after", "_before", "_generators")

    def __init__(self, generators: Sequence[Generator]) -> None:
        self._generators = generators
        self._before = list(map(_state, generators))

    def moved(self) -> bool:
        """Whether any generator has drawn since; those that have not are forgotten.

        A replay will not ask those either, and so replays in several threads leave alone what the threads share.
        """
        pairs = zip(self._generators, self._before)
        moved = [(g, state) for g, state in pairs if not torch.equal(state, g.get_state())]
        self._generators, self._before = [g for g, _ in moved], [state for _, state in moved]
        return bool(moved)

    def replay(self) -> None:
        self._after = list(map(_state, self._generators))
        for generator, state in zip(self._generators, self._before):
            generator.set_state(state)

    def resume(self) -> None:
        for generator, state in zip(self._generators, self._after):
            generator.set_state(state)
