"""Reason: why a call is traced anew: its differences from the most similar call that was traced before."""
from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from torchckpt.errors import Fault, raise_fault
from torchckpt.graph.private.runtime import is_flattened
from torchckpt.graph.trace.guard import Guard, Itself, argument_names
from torchckpt.modules import imported, is_compiled

__all__ = ["check_bare", "reason_of", "refuse_copies", "warn_of_retraces"]

_TENSOR = ("class", "shape", "layout in memory", "dtype", "device", "requires_grad")
_BY_INTEREST = ("shape", "dtype", "device", "requires_grad", "layout in memory", "class")
_AROUND = (
    "autocast", "the kernels of attention that are enabled", "the default dtype, determinism or oneDNN",
    "the default device", "hooks of all modules",
)
_MOST = 3
_OTHERS = "other arguments"
_RETRACES = 8
_Change: TypeAlias = tuple[str, Any, Any]
"""The name of a value that the call depends on, what a guard had of it, and what the next one has."""


def reason_of(model: nn.Module, before: Sequence[Guard], after: Guard, args: Any, kwargs: Any) -> str:
    """The reason for a trace, such as ``the first call``, or ``shape of args[0]: (2, 8), now (3, 8)``."""
    if not before:
        return "the first call"
    names = [name for name, _ in argument_names(args, kwargs)]
    every = [
        [*_differences(model, guard, after, names)] or [*map(_text, _of_outside(guard, after))]
        for guard in reversed(before)
    ]
    texts = min(every, key=lambda texts: (texts[:1] == [_OTHERS], len(texts)))  # _OTHERS comes last: it says little
    more = f", and {len(texts) - _MOST} more" if len(texts) > _MOST else ""
    return ", ".join(texts[:_MOST]) + more if texts else "something else that its code reads"


def warn_of_retraces(model: nn.Module, guards: Sequence[Guard], args: Any, kwargs: Any) -> None:
    """Warn once if the call is traced again and again because a constant changes."""
    if len(guards) != _RETRACES:
        return
    before, after = guards[-2:]
    changes = [*_of_arguments([name for name, _ in argument_names(args, kwargs)], before, after)]
    changes += [*_of_attributes(model, before, after), *_of_outside(before, after)]
    for name, old, new in changes:
        values = _constants(old, new)
        if values is not None:
            warnings.warn(
                f"rematerialize() has traced {_RETRACES} kinds of calls, the last because {name} was {values[0]} and "
                f"is {values[1]}; pass a value that changes often as a tensor, or set it once", stacklevel=2,
            )
            return


def _constants(old: Any, new: Any) -> tuple[Any, Any] | None:
    """Two constants, or words for two objects; None for tensors, and for a constant in place of an object."""
    if isinstance(old, Itself) and isinstance(new, Itself):
        return f"a {type(old.value).__name__}", f"another {type(new.value).__name__}"
    are_constants = all(isinstance(value, tuple) and len(value) == 2 for value in (old, new))
    return (old[1], new[1]) if are_constants else None


def _differences(model: nn.Module, before: Guard, after: Guard, names: list[str]) -> Iterator[str]:
    if before.structure != after.structure:
        yield _OTHERS
    else:
        yield from map(_text, _of_arguments(names, before, after))
    if (before.state, before.shared) != (after.state, after.shared):
        yield "other parameters or buffers"
    else:
        yield from map(_text, _of_kinds(after.state, before.kinds, after.kinds))
    yield from (name for name, old, new in zip(_AROUND, _parts(before.around), _parts(after.around)) if old != new)
    yield from _of_modules(model, before, after)
    names_are_same = (before.structure, before.state) == (after.structure, after.state)
    if names_are_same and (before.places, before.aliases) != (after.places, after.aliases):
        yield "which tensors are the same tensor"


def _of_arguments(names: Sequence[str], before: Guard, after: Guard) -> Iterator[_Change]:
    return _of_kinds(names, before.kinds[len(before.state) :], after.kinds[len(after.state) :])


def _of_kinds(names: Sequence[str], before: Sequence[Any], after: Sequence[Any]) -> Iterator[_Change]:
    return (change for change in zip(names, before, after) if change[1] != change[2])


def _text(change: _Change) -> str:
    name, before, after = change[0], *map(_shown, change[1:])
    if len(before) == len(after) == len(_TENSOR):
        differ = {what: pair for what, pair in zip(_TENSOR, zip(before, after)) if pair[0] != pair[1]}
        what = next(what for what in _BY_INTEREST if what in differ)
        old, new = map(bool, differ[what]) if what == "requires_grad" else differ[what]
        return f"{what} of {name}: {old}, now {new}" if old != new else f"{name}, a leaf or none"
    return f"{name}: {before[1]}, now {after[1]}" if len(before) == len(after) == 2 else name


def _of_modules(model: nn.Module, before: Guard, after: Guard) -> Iterator[str]:
    if before.modules != after.modules:
        yield "other modules, or other hooks of them"
        return
    changes = list(_of_attributes(model, before, after))
    modes = {new[1] for name, _, new in changes if _is_mode(name)}
    yield from (_text(change) for change in changes if not _is_mode(change[0]))
    yield from ("train()" if mode else "eval()" for mode in sorted(modes))


def _of_attributes(model: nn.Module, before: Guard, after: Guard) -> Iterator[_Change]:
    for (path, _), olds, news in zip(model.named_modules(), before.attributes, after.attributes):
        old: dict[str, Any] = dict(olds)  # type: ignore[call-overload]  # they are pairs
        new: dict[str, Any] = dict(news)  # type: ignore[call-overload]
        names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
        yield from ((f"{path}.{name}".lstrip("."), old.get(name), new.get(name)) for name in names)


def _is_mode(name: str) -> bool:
    return name.rpartition(".")[2] == "training"


def _of_outside(before: Guard, after: Guard) -> Iterator[_Change]:
    """Differences in values outside of the modules, by position, since names may repeat. None if the names differ."""
    names = [name for name, _ in after.outside]
    if [name for name, _ in before.outside] == names:
        yield from _of_kinds(names, [value for _, value in before.outside], [value for _, value in after.outside])


def _shown(value: Hashable) -> tuple[Any, ...]:
    return (Itself, f"another {type(value.value).__name__}") if isinstance(value, Itself) else _parts(value)


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


_DDP = "DistributedDataParallel(graph.rematerialize(model, ...)): the other order"
_REPLICATE = "replicate(graph.rematerialize(model, ...)): the other order"
_SHARDED = (
    "fully_shard(graph.rematerialize(layer, ...)), of a layer or a model with nothing in it that is sharded; "
    "or torchckpt.checkpoint_module(layer), and fully_shard() as ever"
)
_MADE_OF = "the original module"
_COMPILED = f'{_MADE_OF}, with engine="inductor"; or torch.compile(model, backend=graph.backend(...))'


def check_bare(model: nn.Module) -> None:
    """Raise an ArgumentError where ``model``, or one of its modules, was wrapped or compiled."""
    for path, module in model.named_modules():
        for rule, works in _broken(module):  # the first is enough: usually all layers are wrapped
            raise_fault(Fault(rule, f"a {type(module).__name__}{f', as {path}' if path else ''}", works))


def refuse_copies() -> None:
    """Raise an ArgumentError, because DataParallel is about to copy a traced module."""
    rule = "DataParallel copies the module for each device, and its trace has one set of parameters"
    works = "DistributedDataParallel(graph.rematerialize(model, ...)), with a process for each device"
    raise_fault(Fault(rule, "DataParallel around it", works), "rematerialize()")


def _broken(module: nn.Module) -> Iterator[tuple[str, str]]:
    """The rules that ``module`` breaks, each with the code that works."""
    sharded = imported("torch.distributed.fsdp", "FSDPModule", "FullyShardedDataParallel")
    kinds: list[tuple[Any, str, str]] = [
        (nn.parallel.DistributedDataParallel, "prepares the sum of gradients", _DDP),
        (imported("torch.distributed._composable.replicate", "DDP"), "prepares the sum of gradients", _REPLICATE),
        (sharded, "gathers its parameters", _SHARDED),
        (nn.DataParallel, "runs copies on several devices", _DDP),
    ]
    for kind, does, works in kinds:
        if isinstance(module, kind):
            yield f"this module {does} in each forward, and its Python code would run only during a trace", works
    if is_flattened(module):
        yield "FullyShardedDataParallel has merged the module's parameters into one", _SHARDED
    if isinstance(module, torch.jit.ScriptModule):
        yield "the module is scripted, and has no Python code to trace", _MADE_OF
    elif is_compiled(module):
        yield "the module is compiled, and runs other code than the Python that is traced", _COMPILED
