"""``checkpoint_module``: every call of a module becomes a region; nothing else about the module changes.

The setting of the mixin says what kind of region: ``Options`` of one that is recomputed, ``Moving`` of one that moves.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from torchckpt.errors import Fault, called, kind
from torchckpt.modules import is_compiled_class
from torchckpt.regions.core.checkpointing import run
from torchckpt.regions.core.options import Options, check_options
from torchckpt.regions.moved.region import Moving, move
from torchckpt.regions.private import compiler_of, keep_from_dynamo
from torchckpt.regions.wrap.mixin import COMPILED, Mixin, plain_forward, put, take
from torchckpt.typing import ContextFunction, DeterminismCheck, Function

__all__ = ["ENTER", "RegionHandle", "Setting", "as_region", "checkpoint_module", "is_checkpointed", "module_faults"]

Setting: TypeAlias = Options | Moving

ENTER = "_torchckpt_enter"
"""The attribute of the instance that holds what its calls go to in place of a region, if anything; None in a copy of
such a module, which may be checkpointed anew. It is called as ``enter(module, function, args, kwargs, options)``."""

_OPTIONS = "_torchckpt_options"
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


class _Compiled(NamedTuple):
    """The result of ``module.compile()``."""

    forward: Callable[..., Any]
    """The compiled forward of the plain module."""
    again: Callable[[nn.Module], None]
    """Compiles a module that is no longer checkpointed, with the same arguments."""


def _run(plain: Function, args: tuple[Any, ...], kwargs: dict[str, Any], setting: Setting) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return _run_as(setting, plain, args, kwargs)
    module: nn.Module = plain.__self__  # type: ignore[attr-defined]  # it is a method
    compiled: _Compiled | None = module.__dict__.get(COMPILED)
    function, enter = plain if compiled is None else compiled.forward, module.__dict__.get(ENTER)
    return _run_as(setting, function, args, kwargs) if enter is None else enter(module, function, args, kwargs, setting)


def _run_as(setting: Setting, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(setting, Moving):
        return move(function, args, kwargs, setting)
    return run(function, args, kwargs, setting)


keep_from_dynamo(_run)


class _Region(Mixin):
    """The mixin of a module of which each call is a region."""

    _torchckpt_setting = _OPTIONS
    _torchckpt_call = staticmethod(_run)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile in place, as :meth:`torch.nn.Module.compile` does.

        The compiled code runs inside the region, so that a replay can start before the gradient arrives. Hooks of this
        module itself run outside the region and outside the compiled code."""
        module: Any = self
        if _OPTIONS not in module.__dict__ or is_compiled_class(type(module)):
            super().compile(*args, **kwargs)  # type: ignore[misc]  # the module's own class has it
            return
        forward = torch.compile(plain_forward(module, _Region), *args, **kwargs)
        module.__dict__[COMPILED] = _Compiled(forward, lambda module: module.compile(*args, **kwargs))


class RegionHandle(AbstractContextManager["RegionHandle"]):
    """Undoes one :func:`checkpoint_module` or ``offload_module``, by ``remove()`` or at the end of a ``with`` block."""

    def __init__(self, module: nn.Module, setting: Setting) -> None:
        self._module, self._setting = module, setting

    def remove(self) -> None:
        """Make the module plain again. A second call does nothing."""
        module: Any = self._module
        if module.__dict__.get(_OPTIONS) is not self._setting:
            return
        take(module, _Region)
        module.__dict__.pop(ENTER, None)
        compiled: _Compiled | None = module.__dict__.pop(COMPILED, None)
        if compiled is not None:
            compiled.again(module)

    def __exit__(self, *_: object) -> None:
        self.remove()


@called("checkpoint_module")
def checkpoint_module(
    module: nn.Module,
    *,
    preserve_rng_state: bool = True,
    generators: Sequence[torch.Generator] = (),
    determinism_check: DeterminismCheck = "default",
    context_fn: ContextFunction | None = None,
    early_stop: bool = True,
) -> RegionHandle:
    """From now on, run every call of ``module`` as a region.

    In place: ``state_dict`` keys, ``isinstance``, ``repr``, hooks, pickling and copying stay as they are, and a copy
    checkpoints too, with its own weights. Hooks of ``module`` run outside the region, those of its children inside.

    >>> handles = [torchckpt.checkpoint_module(layer) for layer in model.layers]
    >>> handles[0].remove()           # this one keeps its activations again

    Args:
        module: any ``nn.Module`` whose ``forward`` is a method of its class.
        preserve_rng_state, generators, determinism_check, context_fn, early_stop: as in :func:`checkpoint`.

    Returns:
        A handle whose ``remove()`` makes the module plain again. A ``with`` block on the handle removes at its end.

    Raises:
        ArgumentError: ``module`` is no module, is checkpointed already, or has its ``forward`` set on the instance.
    """
    options = Options(preserve_rng_state, generators, determinism_check, context_fn, early_stop)
    check_options(checkpoint_module, options, module_faults(module, "checkpoint"))
    return as_region(module, options)


def as_region(module: nn.Module, setting: Setting) -> RegionHandle:
    """Run every call of ``module``, which has no faults, as a region."""
    put(module, _Region, setting).__dict__.pop(ENTER, None)
    if module._compiled_call_impl is not None:
        _compile_inside(module)
    return RegionHandle(module, setting)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether every call of ``module`` is a region, by :func:`checkpoint_module`."""
    return isinstance(module.__dict__.get(_OPTIONS), Options)


def _compile_inside(module: Any) -> None:
    """Compile the plain forward, inside the region, for a ``module`` that was compiled in place before."""
    compiled_call = module._compiled_call_impl
    compiler = compiler_of(compiled_call)
    assert compiler is not None  # module_faults refuses the others
    def again(module: Any) -> None:
        module._compiled_call_impl = compiled_call

    module.__dict__[COMPILED] = _Compiled(compiler(plain_forward(module, _Region)), again)
    module._compiled_call_impl = None


def module_faults(module: object, verb: str) -> list[Fault]:
    """Why calls of ``module`` cannot be regions. ``verb`` is that of the call: ``checkpoint`` or ``offload``."""
    works = f"for layer in model.layers: {verb}_module(layer)"
    if not isinstance(module, nn.Module):
        return [Fault("the module is not an nn.Module", kind(module), f"{works}; or {verb}(function, x)")]
    name = type(module).__name__
    if _OPTIONS in module.__dict__ and module.__dict__.get(ENTER, module) is not None:
        already = f"{'checkpointed' if is_checkpointed(module) else 'offloaded'} already"
        works = "handle.remove() first; where it is a copy, before it is copied"
        return [Fault(f"the module is {already}", f"{name}, {already}", works)]
    if type(module) in _CONTAINERS:
        received = f"{name}, whose layers are called one by one"
        return [Fault("the module has no forward that is called", received, works)]
    if isinstance(module, torch.jit.ScriptModule) or (
        "forward" in module.__dict__ and not is_compiled_class(type(module))
    ):
        received = f"{name}, whose forward is set on the instance or is a script"
        rule = "the forward is not a method of the module's class"
        return [Fault(rule, received, f"{verb}(module, x) at the call")]
    if module._compiled_call_impl is not None and compiler_of(module._compiled_call_impl) is None:
        rule = "the module was compiled in place, and not by torch's own module.compile()"
        return [Fault(rule, f"{name}, compiled in place", f"{verb}_module(module), and then module.compile()")]
    return []
