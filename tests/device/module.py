"""``torch.sim``: for the simulated device what ``torch.cuda`` is for CUDA."""
from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, accelerator

__all__ = ["device_module"]

_TYPE = torch._C._autograd.DeviceType.PrivateUse1.value
_CYCLES_PER_SECOND = 2e9  # those of _sleep, about a GPU's


def device_module(native: Any) -> types.ModuleType:
    """The module, on the library ``native``."""
    module = _Module("torch.sim", __doc__)
    for part in (_devices(native), _streams(native), _generators(native), _memory()):
        for name, value in part.items():
            setattr(module, name, value)
    return module


class _Module(types.ModuleType):
    @property
    def _initialized(self) -> bool:  # torch.utils.checkpoint asks so whether there are random numbers to keep
        return bool(self.is_initialized())


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return accelerator.current_device_index() if index is None else index


class _Device(AbstractContextManager[None]):
    """Makes a device current inside."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = torch._C._accelerator_exchangeDevice(self.idx)

    def __exit__(self, *error: object) -> None:
        torch._C._accelerator_maybeExchangeDevice(self.prev_idx)


def _devices(native: Any) -> dict[str, Any]:
    def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
        return _Device(tensor.device) if tensor.device.type == "sim" else nullcontext()

    return {
        "is_available": lambda: True,
        "is_initialized": native.is_used,
        "_is_in_bad_fork": native.is_bad_fork,
        "init": native.use,
        "_lazy_init": native.use,
        "device_count": native.device_count,
        "current_device": accelerator.current_device_index,
        "set_device": lambda device: accelerator.set_device_index(_index(device)),
        "device": _Device,
        "device_of": device_of,
        "synchronize": lambda device=None: accelerator.synchronize(_index(device)),
        "get_device_name": lambda device=None: "a simulated device",
        "get_device_capability": lambda device=None: (0, 0),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda including_emulation=True: True,
    }


class Stream(torch.Stream):
    """A new stream of ``device``, or of the current one. The priority is ignored."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Any:
        if known:  # a stream that is there, by its numbers
            return super().__new__(cls, **known)
        return super().__new__(cls, torch.device("sim", _index(device)), priority=priority)


def event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """A point on a stream, as ``torch.cuda.Event``. No class: ``elapsed_time`` takes ``torch.Event`` alone."""
    return torch.Event("sim", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def _streams(native: Any) -> dict[str, Any]:
    def default_stream(device: Any = None) -> torch.Stream:
        index = native.checked(_index(device))
        return torch.Stream(stream_id=0, device_index=index, device_type=_TYPE)

    def stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else _OnStream(stream)

    def _sleep(cycles: int) -> None:
        native.sleep(-1, cycles / _CYCLES_PER_SECOND)

    return {
        "Stream": Stream,
        "Event": event,
        "current_stream": lambda device=None: accelerator.current_stream(_index(device)),
        "default_stream": default_stream,
        "set_stream": accelerator.set_stream,
        "stream": stream,
        "_sleep": _sleep,
    }


class _OnStream(AbstractContextManager[None]):
    """Makes a stream current inside, and its device."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream, self._device = stream, _Device(stream.device_index)

    def __enter__(self) -> None:
        self._device.__enter__()
        self._stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._stream.__exit__(*error)
        self._device.__exit__(*error)


def _generators(native: Any) -> dict[str, Any]:
    generators: tuple[torch.Generator, ...] = tuple(native.generator(index) for index in range(native.device_count()))

    def of(device: Any) -> torch.Generator:
        return generators[native.checked(_index(device))]

    def set_rng_state_all(states: Iterable[Tensor]) -> None:
        for generator, state in zip(generators, states):
            generator.set_state(state)

    def all_of(method: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            for generator in generators:
                getattr(generator, method)(*args)

        return call

    return {
        "default_generators": generators,
        "get_rng_state": lambda device=None: of(device).get_state(),
        "set_rng_state": lambda new_state, device=None: of(device).set_state(new_state),
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "set_rng_state_all": set_rng_state_all,
        "manual_seed": lambda seed: of(None).manual_seed(seed),
        "manual_seed_all": all_of("manual_seed"),
        "seed": lambda: of(None).seed(),
        "seed_all": all_of("seed"),
        "initial_seed": lambda: of(None).initial_seed(),
    }


def _memory() -> dict[str, Any]:
    names = {
        "memory_allocated": "memory_allocated",
        "max_memory_allocated": "max_memory_allocated",
        "memory_reserved": "memory_allocated",  # nothing is kept beside what is allocated
        "max_memory_reserved": "max_memory_allocated",
        "memory_stats": "memory_stats",
        "reset_peak_memory_stats": "reset_peak_memory_stats",
        "reset_accumulated_memory_stats": "reset_accumulated_memory_stats",
        "mem_get_info": "get_memory_info",
    }
    calls = {name: getattr(accelerator, of) for name, of in names.items()}
    by_device = {name: (lambda device=None, call=call: call(_index(device))) for name, call in calls.items()}
    return {**by_device, "empty_cache": accelerator.empty_cache}
