"""Guard: what a trace of a module depends on beside the values of tensors; a call with another guard is traced anew."""
from __future__ import annotations

import copy
import enum
import types
import warnings
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchckpt.errors import CaptureError, Fault

__all__ = [
    "Attributes",
    "Constant",
    "Guard",
    "argument_names",
    "attributes_of",
    "changed",
    "guard_of",
    "leaving_no_tensors",
    "places_of",
    "warn_of_retraces",
]


class Constant(NamedTuple):
    """1, 1.0 and True are equal, and not the same; nor are 0.0 and -0.0: floats are kept as they are written."""

    kind: type
    value: Hashable


Attributes = tuple[tuple[tuple[str, Constant], ...], ...]
"""Of each module those that hold constants, by name."""

_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout,
    torch.memory_format, type, types.FunctionType, types.BuiltinFunctionType,
)
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training"}
_RETRACES = 8
_MOST_PARTS = 64  # a longer list is data, such as a vocabulary, and would be looked through at each call


class Guard(NamedTuple):
    """``around`` are torch's modes; ``modules`` their classes, children and hooks; ``places`` tell of tensors that come
    twice; ``kinds`` tell of a tensor its shape, strides, dtype and device, of another argument what it is."""

    around: Hashable
    modules: Hashable
    attributes: Attributes
    state: tuple[str, ...]
    structure: Hashable
    places: tuple[int, ...]
    kinds: tuple[Hashable, ...]


def guard_of(model: nn.Module, state: Mapping[str, Tensor], args: Any, kwargs: Any, ignored: Collection[str]) -> Guard:
    """Of a call of ``model``.

    Args:
        ignored: attributes that do not count.

    Raises:
        CaptureError: an argument is neither a tensor nor a constant.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    kinds = (*map(_kind, state.values()), *map(_kind, leaves))
    if None in kinds:
        path, leaf = next((path, leaf) for path, leaf in argument_names(args, kwargs) if _kind(leaf) is None)
        raise CaptureError(str(Fault(
            "arguments are tensors and constants, in containers that torch can look into", f"{path} is a {type(leaf)}",
            "torch.from_numpy(array); torch.export.register_dataclass(Batch); its tensors, one by one",
        )))
    tensors = [*state.values(), *_tensors(leaves)]
    modules = tuple((type(module), tuple(module._modules), _hooks(module)) for module in model.modules())
    attributes = attributes_of(model, ignored)
    return Guard(_around(), modules, attributes, tuple(state), structure, places_of(tensors), kinds)


def attributes_of(model: nn.Module, ignored: Collection[str] = ()) -> Attributes:
    """Constants, and tuples and lists of them. Of other objects it is not seen that they change."""
    return tuple(
        tuple(
            (name, constant) for name, value in module.__dict__.items()
            if name not in _OF_EVERY_MODULE and name not in ignored and (constant := _constant(value)) is not None
        )
        for module in model.modules()
    )


def changed(before: Attributes, after: Attributes) -> set[str]:
    """The names of attributes that differ, or that are there once."""
    return {name for first, second in zip(before, after) for name, _ in set(first) ^ set(second)}


def places_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Of each tensor its place among those that differ.

    One that comes twice is one input of the trace: its gradients are added up in eager's order.
    """
    places: dict[int, int] = {}
    return tuple(places.setdefault(id(tensor), len(places)) for tensor in tensors)


def argument_names(args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Of each leaf of the arguments, how to write it: ``args[0]``, ``kwargs['mask']``."""
    for path, leaf in pytree.tree_flatten_with_path({"args": args, "kwargs": kwargs})[0]:
        yield pytree.keystr(path).replace("['args']", "args", 1).replace("['kwargs']", "kwargs", 1), leaf


@contextmanager
def leaving_no_tensors(model: nn.Module) -> Iterator[None]:
    """Trace a forward of ``model`` inside. What it leaves on its modules has no data, and goes.

    Recurrent layers have a list of their parameters, which ``torch.func.functional_call`` leaves with those of the
    trace; weights that the old weight and spectral norm make of parameters are made again at each call.

    Raises:
        CaptureError: it is something else that was left.
    """
    before, left = _tensors_of(model), []
    try:
        yield
    finally:
        for (place, name), (_, tensors) in _tensors_of(model).items():
            module, (value, known) = model.get_submodule(place), before.get((place, name), (None, ()))
            if {id(tensor) for tensor in tensors} <= {id(tensor) for tensor in known}:
                continue
            is_made_of_parameters = any(parameter.startswith(f"{name}_") for parameter in module._parameters)
            if not (is_made_of_parameters or (known and all(isinstance(tensor, nn.Parameter) for tensor in known))):
                left.append(f"{name} of {type(module).__name__} {place!r} holds one".replace(" ''", ""))
            del module.__dict__[name]
            module.__dict__.update({name: value} if (place, name) in before else {})
    if left:
        rule = "a call that is recomputed returns what it makes, and leaves no tensor on its modules"
        works = f"return output, {left[0].split()[0]}"
        raise CaptureError(str(Fault(rule, f"after the forward, {left[0]}", works)))


def _tensors_of(model: nn.Module) -> dict[tuple[str, str], tuple[Any, tuple[Tensor, ...]]]:
    """By module and attribute: its value, and the tensors in it; not of parameters and buffers."""
    return {
        (place, name): (copy.copy(value) if isinstance(value, (list, dict)) else value, tuple(_tensors(value)))
        for place, module in model.named_modules()
        for name, value in module.__dict__.items()
        if name not in _OF_EVERY_MODULE and isinstance(value, (Tensor, list, tuple, dict))
    }


def warn_of_retraces(model: nn.Module, guards: Sequence[Guard], args: Any, kwargs: Any) -> None:
    """Warn, once, where a constant that changes has the call traced again and again."""
    if len(guards) != _RETRACES:
        return
    for name, first, second in _differences(model, guards[-2], guards[-1], argument_names(args, kwargs)):
        warnings.warn(
            f"rematerialize() has traced {_RETRACES} kinds of calls, the last because {name} was {first} and is "
            f"{second}; pass what always changes as a tensor", stacklevel=2,
        )
        return


def _differences(
    model: nn.Module, before: Guard, after: Guard, names: Iterator[tuple[str, Any]]
) -> Iterator[tuple[str, Hashable, Hashable]]:
    first, second = before.kinds[len(before.state) :], after.kinds[len(after.state) :]
    pairs = [(name, old, new) for (name, _), old, new in zip(names, first, second)]
    for (place, _), olds, news in zip(model.named_modules(), before.attributes, after.attributes):
        pairs += [(f"{place}.{name}".lstrip("."), old, new) for (name, old), (_, new) in zip(olds, news)]
    for name, one, other in pairs:
        if isinstance(one, Constant) and isinstance(other, Constant) and one != other:
            yield name, one.value, other.value


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _around() -> Hashable:
    autocast = tuple((torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in ("cpu", "cuda"))
    attention: Any = torch.backends.cuda
    kernels = attention.flash_sdp_enabled(), attention.mem_efficient_sdp_enabled(), attention.math_sdp_enabled()
    return autocast, kernels, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


def _hooks(module: nn.Module) -> Hashable:
    kinds = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return tuple(map(tuple, kinds)) if any(kinds) else ()


def _kind(leaf: Any) -> Hashable:
    """None of what is neither a tensor nor a constant."""
    if isinstance(leaf, Tensor):
        lies = leaf.stride() if leaf.layout == torch.strided else leaf.layout
        return type(leaf), tuple(leaf.shape), lies, leaf.dtype, leaf.device, leaf.requires_grad
    return _constant(leaf)


def _constant(value: Any) -> Constant | None:
    if isinstance(value, (tuple, list)):
        parts = tuple(map(_constant, value[:_MOST_PARTS]))
        return None if None in parts or len(value) > _MOST_PARTS else Constant(type(value), parts)
    if not isinstance(value, _CONSTANTS):
        return None
    return Constant(type(value), repr(value) if isinstance(value, (float, complex)) else value)
