"""Ambient state: the thread's settings and random numbers, which a replay must find as the forward found them.

The *settings* are autocast and its cache, the default dtype and device, inference mode, whether a dispatch mode is
there, the compiler's stance, whether subclasses of Tensor see functions, the kernels that are allowed, and the cache of
``parametrize.cached()``. A replay enters only those that differ from the settings of its own thread. Four of them are
of the whole process. The *random numbers* are states of generators. A replay sets them, and puts the states that it
found back at its end.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
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

from torchckpt.regions.devices import accelerator_type
from torchckpt.regions.flags import local
from torchckpt.regions.private import (
    DispatchMode,
    allow_kernels,
    autocast_is_on,
    caching_mode,
    compiler_stance,
    dispatch_modes_are_active,
    kernels_allowed,
    modes_are_active,
    parametrized,
    storage_key,
    torch_functions_are_seen,
    use_stance,
    with_torch_functions,
    without_selective_modes,
)
from torchckpt.tensors import tensors_in
from torchckpt.typing import Function

__all__ = [
    "Ambient", "Draws", "Generator", "RandomState", "Settings", "changing", "differ_in_process", "drawn_since",
    "generators_of", "is_made_here", "outside_inference", "random_state", "restore_states", "set_states", "settings",
    "use_settings", "use_settings_of_process",
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
    list[bool],  # whether kinds of attention, cuDNN and oneDNN are allowed
    Callable[[], dict[Any, Any]] | None,  # what parametrize.cached() held, whose tensors have no ==; None: not entered
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
        kernels_allowed(),
        parametrized["_cache"].copy().copy if parametrized["_cache_enabled"] else None,
    )


def outside_inference() -> AbstractContextManager[Any]:
    """A context without inference mode, which enters nothing where none is on: at its end torch puts back the dispatch
    keys from before, those of a mode that was left inside of it among them."""
    return torch.inference_mode(False) if is_inference_mode_enabled() else nullcontext()


@contextmanager
def use_settings(then: Settings) -> Iterator[None]:
    """Inside the block, the settings of this thread are ``then``, but for those that are of the process. Enters only
    what differs from the current ones."""
    cpu, accelerator, cache, _, device, inference, watched, _, seen, *_ = then
    now = settings()
    with ExitStack() as stack:
        if inference != now[5]:
            stack.enter_context(torch.inference_mode(inference))
        if device != now[4]:
            stack.enter_context(device or torch.device("cpu"))
        for device_type, autocast, before in (("cpu", cpu, now[0]), (accelerator_type(), accelerator, now[1])):
            if device_type and (autocast, cache) != (before, now[2]):
                if now[:2] != (None, None):  # those around go on with their casts, which a thread would end for all
                    torch.autocast_increment_nesting()
                    stack.callback(torch.autocast_decrement_nesting)
                enabled = autocast is not None
                stack.enter_context(torch.autocast(device_type, autocast, enabled=enabled, cache_enabled=cache))
        if watched != now[6]:
            stack.enter_context(_Watch())
        if seen != now[8]:
            stack.enter_context(with_torch_functions(seen))
        yield


changing: list[None] = []
"""One for each replay that has changed a setting of the whole process."""


def differ_in_process(then: Settings, now: Settings) -> bool:
    """Whether those of the process are others. A stance of None is that of any compiler."""
    return (then[3], *then[9:]) != (now[3], *now[9:]) or then[7] not in (None, now[7])


@contextmanager
def use_settings_of_process(then: Settings) -> Iterator[None]:
    """Inside the block, the default dtype, the compiler's stance, the kernels and the cache are those of ``then``, in
    all threads. The caller holds ``state_lock``, or threads would put back what others have set."""
    dtype, stance, allowed = get_default_dtype(), compiler_stance(), kernels_allowed()
    with ExitStack() as stack:
        changing.append(None)
        stack.callback(changing.pop)
        if then[3] != dtype:
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(then[3])
        if then[9] != allowed:
            stack.callback(allow_kernels, allowed)
            allow_kernels(then[9])
        if parametrized["_cache_enabled"] or then[10] is not None:
            stack.callback(parametrized.update, {name: parametrized[name] for name in ("_cache_enabled", "_cache")})
            parametrized.update(_cache_enabled=int(then[10] is not None), _cache={} if then[10] is None else then[10]())
        if then[7] not in (None, stance):
            stack.enter_context(use_stance(then[7]))
        yield


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

    def get_state(self) -> Any: ...
    def set_state(self, state: Any, /) -> Any: ...


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


RandomState: TypeAlias = list[tuple[Generator, Any]]
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
    return [(generator, state) for generator, state in then if not is_same_state(state, generator.get_state())]


def is_same_state(state: Any, other: Any) -> bool:
    return torch.equal(state, other) if isinstance(state, Tensor) else bool(state == other)


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
    for generator, state in reversed(then):  # two may share their state, as two of NumPy on one bit generator
        generator.set_state(state)


class Draws(DispatchMode, caching_mode):  # so that `keep` takes it for what it belongs to
    """Where the operators of a forward leave the generators, so that those of its replay leave them there, too.

    Selective contexts keep the result of an operator, and do not run it again. What it has drawn is not drawn then, and
    all numbers behind it would be others.
    """

    supports_higher_order_operators = True

    def __init__(self, random: RandomState) -> None:
        super().__init__(None, {})
        self._random = random
        self._left: list[RandomState] = []
        self._replayed: int | None = None

    def under(self, function: Function, is_replay: bool) -> Function:
        """``function``, at whose operators this looks where it is called under more modes than there are now."""
        modes = dispatch_modes_are_active()

        def run(*args: Any, **kwargs: Any) -> Any:
            if dispatch_modes_are_active() == modes or (is_replay and not self._left):
                return function(*args, **kwargs)
            self._replayed = 0 if is_replay else None
            with self:
                return function(*args, **kwargs)

        return run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _may_draw(func):
            with without_selective_modes():
                self._look()
        return result

    def _look(self) -> None:
        if self._replayed is None:
            drawn = [generator for generator, _ in drawn_since(self._random)]
            self._random = random_state(generator for generator, _ in self._random)
            self._left.append([each for each in self._random if each[0] in drawn])
        elif self._replayed < len(self._left):
            restore_states(self._left[self._replayed])
            self._replayed += 1


@lru_cache(maxsize=1024)
def _may_draw(operator: Any) -> bool:
    """Whether an operator says that it draws, or is none of torch's own, which may not say it."""
    is_of_torch = getattr(operator, "namespace", None) in ("aten", "prim", "prims")
    return not is_of_torch or torch.Tag.nondeterministic_seeded in operator.tags
