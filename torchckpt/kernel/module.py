"""``checkpoint_module``: every call of a submodule becomes a region, and nothing else about it changes."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from torchckpt.errors import Fault
from torchckpt.kernel.checkpointing import run
from torchckpt.kernel.mixin import Mixin, put, take
from torchckpt.kernel.options import Options, checked
from torchckpt.typing import ContextFunction, DeterminismCheck

__all__ = ["CheckpointHandle", "checkpoint_module"]

_OPTIONS = "_torchckpt_options"


class _Checkpointed(Mixin):
    """In front of the class of a checkpointed module: a call is a region."""

    _torchckpt_setting = _OPTIONS
    _torchckpt_call = staticmethod(run)


class CheckpointHandle:
    """Undoes one :func:`checkpoint_module`. Also a context manager, which undoes it at its end."""

    def __init__(self, module: nn.Module, options: Options) -> None:
        self._module, self._options = module, options

    def remove(self) -> None:
        """Make the module plain again. A second call does nothing."""
        module: Any = self._module
        if module.__dict__.get(_OPTIONS) is not self._options:
            return
        take(module, _Checkpointed)

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
    return CheckpointHandle(put(module, _Checkpointed, options), options)


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
