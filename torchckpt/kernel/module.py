"""``checkpoint_module``: every call of a submodule becomes a region, and nothing else about it changes."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from torchckpt.errors import Fault, raise_faults
from torchckpt.kernel.checkpointing import run
from torchckpt.kernel.options import Options, checked
from torchckpt.typing import ContextFunction, DeterminismCheck

__all__ = ["CheckpointHandle", "checkpoint_module"]

_OPTIONS = "_torchckpt_options"


@functools.cache
def _checkpointed(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``base``, under the same name, whose ``forward`` is a region.

    A subclass, as FSDP2 and parametrize make them, and not an attribute of the instance: a copy of the module, deep,
    shallow or unpickled, then finds its own weights.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = super(checkpointed, self).forward
        options = self.__dict__.get(_OPTIONS)
        return plain(*args, **kwargs) if options is None else run(plain, args, kwargs, options)

    def __reduce_ex__(self: Any, protocol: int) -> tuple[Any, ...]:
        # The class cannot be imported: name its base, and make it again.
        make, made_from, *state = super(checkpointed, self).__reduce_ex__(protocol)
        return (_remake, (base, make, tuple(None if part is checkpointed else part for part in made_from)), *state)

    functools.update_wrapper(forward, base.forward)
    namespace = {"forward": forward, "__reduce_ex__": __reduce_ex__, "__module__": base.__module__, "__doc__": base.__doc__}
    checkpointed = type(base)(base.__name__, (base,), {**namespace, "__qualname__": base.__qualname__})
    return checkpointed


def _remake(base: type[nn.Module], make: Callable[..., Any], made_from: tuple[Any, ...]) -> Any:
    checkpointed = _checkpointed(base)
    return make(*(checkpointed if part is None else part for part in made_from))


class CheckpointHandle:
    """Undoes one :func:`checkpoint_module`. Also a context manager, which undoes it at its end."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def remove(self) -> None:
        """Make the module plain again. A second call does nothing."""
        base = type(self._module).__mro__[1]
        if self._module.__dict__.pop(_OPTIONS, None) is not None and type(self._module) is _checkpointed(base):
            self._module.__class__ = base

    def __enter__(self) -> CheckpointHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def checkpoint_module(
    module: nn.Module,
    *,
    preserve_rng_state: bool = True,
    generators: Sequence[torch.Generator] = (),
    determinism_check: DeterminismCheck = "default",
    context_fn: ContextFunction | None = None,
    early_stop: bool = True,
) -> CheckpointHandle:
    """From now on, run every call of ``module`` as a region.

    In place: ``state_dict`` keys, ``isinstance``, ``repr``, hooks, pickling and copying stay as they are, and a copy
    checkpoints too, with its own weights. Hooks of ``module`` run outside the region, those of its children inside.

    >>> handles = [torchckpt.checkpoint_module(layer) for layer in model.layers]
    >>> handles[0].remove()           # this one keeps its activations again

    Args:
        module: any ``nn.Module`` whose ``forward`` is a method of its class.
        preserve_rng_state, generators, determinism_check, context_fn, early_stop: as in :func:`checkpoint`.

    Returns:
        A handle with ``remove()``; as a context manager it removes at its end.

    Raises:
        ArgumentError: not a module, checkpointed already, or a ``forward`` that is set on the instance.
    """
    options = Options(preserve_rng_state, generators, determinism_check, context_fn, early_stop)
    raise_faults("checkpoint_module", _faults(module))
    checked("checkpoint_module", module, options)
    module.__dict__[_OPTIONS] = options
    module.__class__ = _checkpointed(type(module))
    return CheckpointHandle(module)


def _faults(module: object) -> list[Fault]:
    works = "for layer in model.layers: checkpoint_module(layer)"
    if not isinstance(module, nn.Module):
        return [Fault("the module must be an nn.Module", type(module).__name__, f"{works}; or checkpoint(function, x)")]
    name = type(module).__name__
    if _OPTIONS in module.__dict__:
        return [Fault("a module is checkpointed once", f"{name}, checkpointed already", "handle.remove() first")]
    if "forward" in module.__dict__ or isinstance(module, torch.jit.ScriptModule):
        received = f"{name}, whose forward is set on the instance or is a script"
        return [Fault("the forward must be a method of the module's class", received, "checkpoint(module, x) at the call")]
    return []
