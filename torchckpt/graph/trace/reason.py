"""Reason: why a call is traced anew: its differences from the most similar call that was traced before."""
from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from torchckpt.errors import Fault, called, check, raise_fault
from torchckpt.graph.private.operators import is_flattened, replicated_kinds, sharded_kinds
from torchckpt.graph.trace.guard import Guard, Itself, argument_names
from torchckpt.modules import is_compiled

__all__ = ["check_bare", "reason_of", "refuse_copies"]

_TENSOR = ("class", "shape", "layout in memory", "dtype", "device", "requires_grad")
_BY_INTEREST = ("shape", "dtype", "device", "requires_grad", "layout in memory", "class")
_AROUND = (
    "autocast", "the kernels of attention that are enabled", "the default dtype, determinism or oneDNN",
    "the default device", "hooks of all modules",
)
_MOST = 3
_OTHERS = "other arguments"


def reason_of(model: nn.Module, before: Sequence[Guard], after: Guard, args: Any, kwargs: Any) -> str:
    """The reason for a trace, such as ``the first call``, or ``shape of args[0]: (2, 8), now (3, 8)``."""
    if not before:
        return "the first call"
    names = [name for name, _ in argument_names(args, kwargs)]
    every = [
        list(_differences(model, guard, after, names)) or list(_of_outside(guard, after)) for guard in reversed(before)
    ]
    found = min(every, key=lambda one: (one[:1] == [_OTHERS], len(one)))  # _OTHERS comes last: it says little
    more = f", and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return ", ".join(found[:_MOST]) + more if found else "something else that its code reads"


def _differences(model: nn.Module, before: Guard, after: Guard, names: list[str]) -> Iterator[str]:
    if before.structure != after.structure:
        yield _OTHERS
    else:
        yield from _of_kinds(names, before.kinds[len(before.state) :], after.kinds[len(after.state) :])
    if before.state != after.state:
        yield "other parameters or buffers"
    else:
        yield from _of_kinds(after.state, before.kinds, after.kinds)
    for name, one, other in zip(_AROUND, _parts(before.around), _parts(after.around)):
        if one != other:
            yield name
    yield from _of_modules(model, before, after)
    names_are_same = (before.structure, before.state) == (after.structure, after.state)
    if names_are_same and (before.places, before.aliases) != (after.places, after.aliases):
        yield "which tensors are the same tensor"


def _of_kinds(names: Sequence[str], before: Sequence[Hashable], after: Sequence[Hashable]) -> Iterator[str]:
    for name, one, other in zip(names, before, after):
        if one != other:
            yield _changed(name, _parts(one), _parts(other))


def _changed(name: str, one: tuple[Any, ...], other: tuple[Any, ...]) -> str:
    if len(one) == len(other) == len(_TENSOR):
        differ = {what: pair for what, pair in zip(_TENSOR, zip(one, other)) if pair[0] != pair[1]}
        what = next(what for what in _BY_INTEREST if what in differ)
        old, new = (bool(side) if what == "requires_grad" else side for side in differ[what])
        if old != new:
            return f"{what} of {name}: {old}, now {new}"
        return f"{name}, a leaf or none"
    if len(one) == len(other) == 2:
        return f"{name}: {one[1]}, now {other[1]}"
    return name


def _of_modules(model: nn.Module, before: Guard, after: Guard) -> Iterator[str]:
    if before.modules != after.modules:
        yield "other modules, or other hooks of them"
        return
    modes = set[bool]()
    for (path, _), olds, news in zip(model.named_modules(), before.attributes, after.attributes):
        old: dict[str, Any] = dict(olds)  # type: ignore[call-overload]  # they are pairs
        new: dict[str, Any] = dict(news)  # type: ignore[call-overload]
        for name in dict.fromkeys([*old, *new]):
            if old.get(name) == new.get(name):
                continue
            if name == "training":
                modes.add(new[name][1])
            else:
                yield _changed(f"{path}.{name}".lstrip("."), _shown(old.get(name)), _shown(new.get(name)))
    yield from ("train()" if mode else "eval()" for mode in sorted(modes))


def _of_outside(before: Guard, after: Guard) -> Iterator[str]:
    """Differences in values outside of the modules, by position, since names may repeat. None if the names differ."""
    if [name for name, _ in before.outside] == [name for name, _ in after.outside]:
        for (name, old), (_, new) in zip(before.outside, after.outside):
            if old != new:
                yield _changed(name, _shown(old), _shown(new))


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
    faults = []
    for path, module in model.named_modules():
        for rule, works in _broken(module):
            faults.append(Fault(rule, f"a {type(module).__name__}{f', as {path}' if path else ''}", works))
    check(faults[:1])  # the first is enough: usually all layers are wrapped


def refuse_copies() -> None:
    """Raise an ArgumentError, because DataParallel is about to copy a traced module."""
    rule = "DataParallel copies the module for each device, and its trace has one set of parameters"
    works = "DistributedDataParallel(graph.rematerialize(model, ...)), with a process for each device"
    with called("rematerialize()"):
        raise_fault(Fault(rule, "DataParallel around it", works))


def _broken(module: nn.Module) -> Iterator[tuple[str, str]]:
    """For each rule that ``module`` breaks: the rule, and the code that works."""
    kinds: list[tuple[Any, str, str]] = [
        (nn.parallel.DistributedDataParallel, "prepares the sum of gradients", _DDP),
        (replicated_kinds(), "prepares the sum of gradients", _REPLICATE),
        (sharded_kinds(), "gathers its parameters", _SHARDED),
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
