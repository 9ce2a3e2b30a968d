"""Ambient state: the thread's settings and random numbers, which a replay must find as the forward found them.

The *settings* are autocast and its cache, the default dtype and device, inference mode, whether a dispatch mode is
there, the compiler's stance, and whether subclasses of Tensor see functions. A replay enters only those that differ
from the settings of its own thread. Two of them are of the whole process. The *random numbers* are states of
generators. A replay sets them, and puts the states that it found back at its end.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Condition, get_ident
from typing import Any, Protocol, TypeAlias

import torch
from torch import (
    Tensor,
    get_autocast_dtype,
    get_default_device,
    get_default_dtype,
    is_autocast_cache_enabled,
    is_autocast_enabled,
    is_inference_mode_enabled,
)

from torchckpt.errors import CheckpointError
from torchckpt.regions.devices import accelerator_type
from torchckpt.regions.flags import local
from torchckpt.regions.private import (
    DispatchMode,
    autocast_is_on,
    compiler_stance,
    dispatch_modes_are_active,
    modes_are_active,
    storage_key,
    torch_functions_are_seen,
    use_stance,
    with_torch_functions,
)
from torchckpt.tensors import tensors_in

__all__ = [
    "Ambient",
    "Generator",
    "RandomState",
    "Settings",
    "drawn_since",
    "generators_of",
    "is_made_here",
    "of_process",
    "random_state",
    "restore_states",
    "set_states",
    "settings",
    "use_settings",
]


# settings -----------------------------------------------------------------------------------------------------------


Settings: TypeAlias = tuple[
    torch.dtype | None,  # autocast's dtype on the CPU; None: off
    torch.dtype | None,  # autocast's dtype on the accelerator; None: off
    bool,  # autocast's cache of weights
    torch.dtype,  # the default dtype
    torch.device | None,  # the default device; None: never set
    bool,  # inference mode
    bool,  # whether a dispatch mode sees the operators; composite ones then work in place less often
    Any,  # the stance of torch.compiler: in another one, code that is compiled may run in eager mode
    bool,  # whether subclasses of Tensor see the functions that are called with them
]


def settings() -> Settings:
    """The settings of this thread, now."""
    is_cast = autocast_is_on()
    accelerator = accelerator_type() if is_cast else None
    return (
        get_autocast_dtype("cpu") if is_cast and is_autocast_enabled("cpu") else None,
        get_autocast_dtype(accelerator) if accelerator and is_autocast_enabled(accelerator) else None,
        is_autocast_cache_enabled(),
        get_default_dtype(),
        get_default_device() if modes_are_active() else None,
        is_inference_mode_enabled(),
        dispatch_modes_are_active() > 0,
        compiler_stance(),
        torch_functions_are_seen(),
    )


@contextmanager
def use_settings(then: Settings) -> Iterator[None]:
    """Inside the block, the settings of this thread are ``then``, but for the two that are of the process. Enters only
    what differs from the current ones."""
    cpu, accelerator, cache, _, device, inference, watched, _, seen = then
    now = settings()
    with ExitStack() as stack:
        if inference != now[5]:
            stack.enter_context(torch.inference_mode(inference))
        if device != now[4]:
            stack.enter_context(device or torch.device("cpu"))
        for device_type, autocast, before in (("cpu", cpu, now[0]), (accelerator_type(), accelerator, now[1])):
            if device_type and (autocast, cache) != (before, now[2]):
                enabled = autocast is not None
                stack.enter_context(torch.autocast(device_type, autocast, enabled=enabled, cache_enabled=cache))
        if watched != now[6]:
            stack.enter_context(_Watch())
        if seen != now[8]:
            stack.enter_context(with_torch_functions(seen))
        yield


_PATIENCE_SECONDS = 300


class _OfProcess:
    """The default dtype and the compiler's stance, which all threads find, while threads need others than were there.

    Those that need the same have them together, and the last one puts back what was there. Who needs others waits.
    """

    vary = False
    """Whether a replay has ever needed others than it found. From then on all replays say what they need."""

    def __init__(self) -> None:
        self._users: Counter[int] = Counter()
        """By thread, how often it is inside of :meth:`used`."""
        self._changed = Condition()
        self._found: tuple[torch.dtype, Any] = get_default_dtype(), None

    def note(self, then: Settings, now: Settings) -> None:
        """Note that a replay needs ``then``, and finds ``now``."""
        if then[3] != now[3] or then[7] not in (None, now[7]):
            self.vary = True

    @contextmanager
    def used(self, dtype: torch.dtype, stance: Any) -> Iterator[None]:
        """Inside the block, they are these. A stance of None is any."""
        me, needed = get_ident(), (dtype, stance)
        count, before = self._users[me], self._found
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: self._users.keys() <= {me} or _has(*needed), _PATIENCE_SECONDS):
                    raise CheckpointError(
                        "a replay, or a count of costs, needs another default dtype or stance of torch.compiler than "
                        "other threads, which have them for the whole process\n"
                        f"  received: {needed}; others have needed {(get_default_dtype(), compiler_stance())} for "
                        f"{_PATIENCE_SECONDS} seconds\n"
                        "  works:    set_default_dtype() and set_stance() around whole steps, with their backwards"
                    )
                before = get_default_dtype(), compiler_stance()
                if not self._users:
                    self._found = before
                self._users[me] = count + 1
                _set(*needed)
            yield
        finally:
            with self._changed:
                if self._users[me] > count:  # or it was interrupted before
                    self._users[me] = count
                    self._users += Counter()  # drop threads that are in no block
                    if self._users.keys() <= {me}:
                        _set(*(before if self._users else self._found))
                    self._changed.notify_all()


def _has(dtype: torch.dtype, stance: Any) -> bool:
    return dtype == get_default_dtype() and stance in (None, compiler_stance())


def _set(dtype: torch.dtype, stance: Any) -> None:
    if stance not in (None, compiler_stance()):
        use_stance(stance)
    if dtype != get_default_dtype():
        torch.set_default_dtype(dtype)


of_process = _OfProcess()
"""One for all threads."""


class _Watch(DispatchMode):
    """Has composite operators run as in the forward. If that had no mode, it notes what the replay makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: set[int | None] = set()
        if dispatch_modes_are_active() and local.thread.flags[2] is not None:
            local.thread.flags[2].made = self._made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_key(tensor) for tensor in tensors_in((args, kwargs))}
        self._made.update(key for tensor in tensors_in(result) if (key := storage_key(tensor)) not in given)
        return result


def is_made_here(tensor: Tensor) -> bool:
    """Whether the running replay is known to have made ``tensor``, whose version then tells nothing of the forward."""
    return storage_key(tensor) in getattr(local.thread.flags[2], "made", ())


# random numbers -----------------------------------------------------------------------------------------------------


class Generator(Protocol):
    """An object that gets and sets a random state, such as a :class:`torch.Generator`."""

    def get_state(self) -> Tensor: ...
    def set_state(self, state: Tensor, /) -> Any: ...


class _ModuleGenerator:
    # For a device whose module has get_rng_state and set_rng_state, but no ``default_generators``.
    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = () if device.type == "mps" else (device,)  # there is one MPS device, and no argument for it

    def get_state(self) -> Tensor:
        state: Tensor = self._module.get_rng_state(*self._device)
        return state

    def set_state(self, state: Tensor, /) -> None:
        self._module.set_rng_state(state, *self._device)


def _device_generator(device: torch.device) -> Generator:
    generators: Sequence[Generator] = getattr(torch.get_device_module(device), "default_generators", ())
    index = device.index or 0
    return generators[index] if index < len(generators) else _ModuleGenerator(device)


def generators_of(devices: Sequence[torch.device], named: Sequence[Generator]) -> Sequence[Generator]:
    """The CPU's default generator, that of each of ``devices`` (accelerators), and those that the caller ``named``."""
    if not devices and not named:
        return (torch.default_generator,)
    return list(dict.fromkeys([torch.default_generator, *map(_device_generator, devices), *named]))


RandomState: TypeAlias = list[tuple[Generator, Tensor]]
"""Generators, each with a state."""


def random_state(generators: Iterable[Generator]) -> RandomState:
    """The states of ``generators``, now."""
    return [(generator, generator.get_state()) for generator in generators]


def drawn_since(then: RandomState) -> RandomState:
    """The part of ``then`` whose generators have drawn since.

    The replay will not draw from the other generators either. If it left out none, replays in several threads would set
    generators that the threads share. Under a dispatch mode, such as that of a trace, states cannot be compared, and
    all of ``then`` is returned.
    """
    if dispatch_modes_are_active():
        return then
    return [(generator, state) for generator, state in then if not torch.equal(state, generator.get_state())]


Ambient: TypeAlias = tuple[Settings, RandomState]
"""The ambient state of one call."""


def set_states(then: RandomState) -> RandomState:
    """Set the states of ``then``, and return the states before. If a generator raises, all states stay as before."""
    now: RandomState = []
    try:
        for generator, state in then:
            now.append((generator, generator.get_state()))
            generator.set_state(state)
    except BaseException:
        restore_states(now)
        raise
    return now


def restore_states(then: RandomState) -> None:
    """Set every generator of ``then`` to its state."""
    for generator, state in then:
        generator.set_state(state)
