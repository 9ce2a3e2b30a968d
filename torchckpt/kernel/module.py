"""``checkpoint_module``: every call of a submodule becomes a region, and nothing else about it changes."""
from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from torchckpt.errors import Fault
from torchckpt.kernel.checkpointing import run
from torchckpt.kernel.options import Options, checked
from torchckpt.typing import ContextFunction, DeterminismCheck

__all__ = ["CheckpointHandle", "checkpoint_module"]

_OPTIONS = "_torchckpt_options"


class _Checkpointed:
    """Mixed into the class of a checkpointed module, in front of it.

    A class, as FSDP2 and parametrize make one, and not an attribute of the instance: a copy of the module, deep,
    shallow or unpickled, then finds its own weights.
    """

    def __init_subclass__(cls, **_: Any) -> None:
        """Do not tell the base class: it knows nothing of this subclass, and may want arguments."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class cannot be imported: name its base, and make it again.
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *state = reduced
        own, base = type(self), type(self).__bases__[-1]
        plain = tuple(base if argument is own else argument for argument in arguments)
        return (_remade, (make, plain, self.__dict__.get(_OPTIONS)), *state)


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """For a base that copies itself its own way, which it does in its own class."""
    cls = type(self)
    self.__class__ = cls.__bases__[-1]
    try:
        copied = copy.deepcopy(self, memo)
    finally:
        self.__class__ = cls
    return _checkpointed(copied, self.__dict__.get(_OPTIONS))


def _remade(make: Callable[..., Any], arguments: tuple[Any, ...], options: Options | None) -> Any:
    return _checkpointed(make(*arguments), options)


def _checkpointed(module: Any, options: Options | None) -> Any:
    if not isinstance(module, _Checkpointed):
        module.__class__ = _class_for(type(module))
    if options is not None:
        module.__dict__[_OPTIONS] = options
    return module


def _class_for(base: type[Any]) -> type[Any]:
    """The subclass of ``base``, under its name, whose ``forward`` is a region. It dies with its last user."""
    for made in base.__subclasses__():
        if made.__bases__ == (_Checkpointed, base):
            return made

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = super(checkpointed, self).forward
        options = self.__dict__.get(_OPTIONS)
        return plain(*args, **kwargs) if options is None else run(plain, args, kwargs, options)

    namespace = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    namespace["forward"] = forward
    if hasattr(base, "__deepcopy__"):
        namespace["__deepcopy__"] = _deepcopy
    metaclass: Any = type(base)
    checkpointed: type[Any] = metaclass(base.__name__, (_Checkpointed, base), namespace)
    return checkpointed


class CheckpointHandle:
    """Undoes one :func:`checkpoint_module`. Also a context manager, which undoes it at its end."""

    def __init__(self, module: nn.Module, options: Options) -> None:
        self._module, self._options = module, options

    def remove(self) -> None:
        """Make the module plain again. A second call does nothing."""
        module: Any = self._module
        if module.__dict__.get(_OPTIONS) is not self._options:
            return
        del module.__dict__[_OPTIONS]
        if type(module).__bases__[0] is _Checkpointed:
            module.__class__ = type(module).__bases__[1]

    def __enter__(self) -> Self:
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
    checked("checkpoint_module", checkpoint_module, options, _faults(module))
    return CheckpointHandle(_checkpointed(module, options), options)


def _faults(module: object) -> list[Fault]:
    works = "for layer in model.layers: checkpoint_module(layer)"
    if not isinstance(module, nn.Module):
        return [Fault("the module must be an nn.Module", type(module).__name__, f"{works}; or checkpoint(function, x)")]
    name = type(module).__name__
    if _OPTIONS in module.__dict__:
        return [Fault("a module is checkpointed once", f"{name}, checkpointed already", "handle.remove() first")]
    if "forward" in module.__dict__ or isinstance(module, torch.jit.ScriptModule):
        received = f"{name}, whose forward is set on the instance or is a script"
        rule = "the forward must be a method of the module's class"
        return [Fault(rule, received, "checkpoint(module, x) at the call")]
    return []
