"""Guard: all that a trace depends on beside the values of tensors; a call with a different guard is traced anew."""
from __future__ import annotations

import enum
import functools
import types
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from torchckpt.errors import CaptureError, Fault
from torchckpt.graph.private.runtime import hooks_of_all_modules, storage_number
from torchckpt.modules import OF_EVERY_MODULE
from torchckpt.tensors import tensors_in

__all__ = [
    "CONSTANTS", "MOST_PARTS", "WITHOUT_CACHE", "Guard", "argument_names", "changed", "constant_of", "guard_of",
    "is_cache", "is_container", "parts_of", "places_of",
]


CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, slice, range, enum.Enum, torch.dtype, torch.device, torch.layout,
    torch.memory_format, type, types.FunctionType, types.BuiltinFunctionType,
)
WITHOUT_CACHE = (
    "model(..., use_cache=False); or, once, use_cache = False in model.config and in each copy of it that a part has, "
    "such as model.decoder.config"
)
_CONTAINERS = (tuple, list, dict, set, frozenset)
_PLAIN = frozenset({type(None), bool, int, str, types.FunctionType})
_OUTSIDE = "outside of the modules"
MOST_PARTS = 64  # a longer container is data, such as a vocabulary: not compared at each call


class Guard(NamedTuple):
    """What a trace depends on. ``around``: torch's modes. ``modules``: classes, children and hooks of all modules.
    ``attributes``: constants on each module. ``state``: names of parameters and buffers. ``shared``: which of these and
    of the modules are the same. ``structure``: of the arguments. ``places``: which tensors are the same tensor.
    ``aliases``: arguments that lie in buffers. ``kinds``: shape, strides, dtype and device of each tensor, and the
    other arguments. ``outside``: what else the code reads."""

    around: Hashable
    modules: Hashable
    attributes: tuple[Hashable, ...]
    state: tuple[str, ...]
    shared: tuple[Hashable, ...]
    structure: Hashable
    places: tuple[int, ...]
    aliases: tuple[Hashable, ...]
    kinds: tuple[Hashable, ...]
    outside: tuple[tuple[str, Hashable], ...] = ()

    def without(self, model: nn.Module, ignored: Collection[tuple[str, str]]) -> Guard:
        """The guard without these attributes, given by module path and name."""
        if not ignored:
            return self
        kept = (
            tuple(pair for pair in pairs if (path, pair[0]) not in ignored)  # type: ignore[attr-defined]
            for (path, _), pairs in zip(model.named_modules(), self.attributes)
        )
        outside = tuple(pair for pair in self.outside if (_OUTSIDE, pair[0]) not in ignored)
        return self._replace(attributes=tuple(kept), outside=outside)


def guard_of(
    model: nn.Module, state: Mapping[str, Tensor], args: Any, kwargs: Any,
    outside: tuple[tuple[str, Hashable], ...] = (),
) -> Guard:
    """The guard of a call of ``model``.

    Raises:
        CaptureError: an argument is neither a tensor nor a constant, or a parameter has no shape yet.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    kinds = (*map(_kind, state.values()), *map(_kind, leaves))
    if None in kinds:
        _refuse_argument(state, args, kwargs)
    parts = list(model.modules())
    modules = tuple((type(module), tuple(module._modules), _hooks(module)) for module in parts)
    attributes, shared = tuple(map(_attributes, parts)), tuple(_shared(parts))
    tensors = tensors_in(leaves)
    places, aliases = places_of(list(state.values()), tensors), _aliases(state, tensors)
    return Guard(_around(), modules, attributes, tuple(state), shared, structure, places, aliases, kinds, outside)


def _refuse_argument(state: Mapping[str, Tensor], args: Any, kwargs: Any) -> NoReturn:
    lazy = next((name for name, tensor in state.items() if is_lazy(tensor)), None)
    if lazy is not None:
        rule = "a parameter has no shape yet, when the call is traced"
        raise CaptureError(str(Fault(rule, f"{lazy} has none yet", "model(*inputs), once, before rematerialize()")))
    path, leaf = next((path, leaf) for path, leaf in argument_names(args, kwargs) if _kind(leaf) is None)
    if is_cache(leaf):
        rule = "the step takes a cache of keys and values, and is differentiated"
        raise CaptureError(str(Fault(rule, f"{path} is a {type(leaf)}", WITHOUT_CACHE)))
    raise CaptureError(str(Fault(
        "an argument is no tensor, no constant, and no container that torch can look into", f"{path} is a {type(leaf)}",
        "torch.from_numpy(array); torch.export.register_dataclass(Batch); its tensors, one by one",
    )))


def is_cache(value: object) -> bool:
    """Whether ``value`` is a key-value cache of a transformers model, such as a ``DynamicCache``."""
    return type(value).__name__.endswith("Cache")


def _attributes(module: nn.Module) -> tuple[tuple[str, Hashable], ...]:
    """The names and values of the attributes that are no tensors: constants by value, others by identity."""
    attributes: list[tuple[str, Hashable]] = []
    for name, value in module.__dict__.items():
        if name in OF_EVERY_MODULE:
            continue
        kind = type(value)
        constant = (kind, value) if kind in _PLAIN else constant_of(value)
        if constant is not None:
            attributes.append((name, constant))
        elif not _holds_tensors(value):
            attributes.append((name, Itself(value)))
    return tuple(attributes)


class Itself:
    """An object compared by identity: a guard notices that it is replaced, but not that it changes."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _holds_tensors(value: Any) -> bool:
    if not is_container(type(value)):
        return isinstance(value, Tensor)
    return any(isinstance(part, Tensor) for part in parts_of(value))


def parts_of(container: Any) -> Iterable[Any]:
    """The values of a mapping, or the members of another container."""
    return container.values() if isinstance(container, Mapping) else container


def changed(model: nn.Module, before: Guard, after: Guard) -> set[tuple[str, str]]:
    """The attributes, by module path and name, that a forward has set: those that differ, appeared or vanished."""
    outside = {(_OUTSIDE, name) for name, _ in set(before.outside) ^ set(after.outside)}
    if before.modules != after.modules:
        return outside
    pairs = zip(model.named_modules(), before.attributes, after.attributes)
    names = {(path, name) for (path, _), old, new in pairs for name, _ in set(old) ^ set(new)}  # type: ignore[call-overload]
    return outside | {(path, name) for path, name in names if name != "training"}


def places_of(state: Sequence[Tensor], arguments: Sequence[Tensor]) -> tuple[int, ...]:
    """The place of each parameter, buffer and argument among the inputs of the trace.

    A tensor that occurs twice is one input, so that its gradients are added in the order of eager. Data without a
    gradient is one for each argument: the same tensor in two places is a call like any other.
    """
    places: dict[object, int] = {}
    known = set(map(id, state))
    keys: list[object] = [id(tensor) for tensor in state]
    keys += [id(x) if x.requires_grad or id(x) in known else (place,) for place, x in enumerate(arguments)]
    return tuple(places.setdefault(key, len(places)) for key in keys)


def _aliases(state: Mapping[str, Tensor], arguments: Sequence[Tensor]) -> tuple[Hashable, ...]:
    """Arguments that share a storage with a buffer, with their offsets: a change of one changes the other."""
    places = {storage_number(tensor): place for place, tensor in enumerate(arguments)}
    buffers = ((name, tensor) for name, tensor in state.items() if type(tensor) is not nn.Parameter)
    shared = ((name, places.get(storage_number(buffer))) for name, buffer in buffers)
    return tuple((name, place, arguments[place].storage_offset()) for name, place in shared if place is not None)


def argument_names(args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Each leaf of the arguments with its expression, such as ``args[0]`` or ``kwargs['mask']``."""
    for path, leaf in pytree.tree_flatten_with_path({"args": args, "kwargs": kwargs})[0]:
        yield pytree.keystr(path).replace("['args']", "args", 1).replace("['kwargs']", "kwargs", 1), leaf


def _around() -> Hashable:
    accelerator = torch.accelerator.current_accelerator()
    names = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    casts = tuple((torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in names)
    autocast = casts, torch.is_autocast_cache_enabled()
    attention: Any = torch.backends.cuda
    kernels = attention.flash_sdp_enabled(), attention.mem_efficient_sdp_enabled(), attention.math_sdp_enabled()
    modes = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled
    return autocast, kernels, modes, torch.get_default_device(), hooks_of_all_modules()


def _shared(modules: Sequence[nn.Module]) -> Iterator[Hashable]:
    """For each module, which of its submodules, parameters and buffers are the same, in which other places of all."""
    numbers: dict[int, int] = {}
    for module in modules:
        parts = *module._modules.values(), *module._parameters.values(), *module._buffers.values()
        yield tuple([numbers.setdefault(id(part), len(numbers)) for part in parts])


def _hooks(module: nn.Module) -> Hashable:
    kinds = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return tuple(map(tuple, kinds)) if any(kinds) else ()


def _kind(leaf: Any) -> Hashable:
    """What the guard compares of ``leaf``; None for a tensor without a shape, or neither a tensor nor a constant."""
    if isinstance(leaf, Tensor):
        if is_lazy(leaf):
            return None
        lies = leaf.stride() if leaf.layout == torch.strided else leaf.layout
        differentiated = leaf.requires_grad and (1 if leaf.is_leaf else 2)  # autocast casts leaves once
        return type(leaf), tuple(leaf.shape), lies, leaf.dtype, leaf.device, differentiated
    return constant_of(leaf)


def constant_of(value: Any) -> tuple[type, Hashable] | None:
    """A key that tells constants apart, also 1 from 1.0 and True, and 0.0 from -0.0. None if it is not a constant."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, (float, complex)):
        return kind, repr(value)
    if isinstance(value, functools.partial) or (issubclass(kind, _CONTAINERS) and is_container(kind)):
        return _container(value)
    if isinstance(value, types.MethodType):
        return kind, (value.__func__, id(value.__self__))
    return (kind, value) if isinstance(value, CONSTANTS) and isinstance(value, Hashable) else None


def is_container(kind: type) -> bool:
    """Whether ``kind`` is a list, a tuple, a set, or a mapping of Python's own: others may load what they are asked."""
    if kind in _PLAIN_CONTAINERS:
        return True
    if not issubclass(kind, Mapping):
        return issubclass(kind, (list, tuple, set, frozenset))
    owners = [next(cls for cls in kind.__mro__ if name in vars(cls)) for name in _ACCESS]
    return all(owner.__module__ in _PYTHON for owner in owners)


_PLAIN_CONTAINERS = frozenset({list, tuple, dict, set, frozenset})
_ACCESS = "__iter__", "__len__", "__getitem__", "items", "values"
_PYTHON = frozenset({"builtins", "collections", "collections.abc", "types"})


def _container(value: Any) -> tuple[type, Hashable] | None:
    if isinstance(value, functools.partial):
        parts: list[Any] = [value.func, value.args, value.keywords]
    else:
        parts = [part for pair in value.items() for part in pair] if isinstance(value, dict) else list(value)
    if len(parts) > MOST_PARTS:
        return None
    constants: tuple[Hashable, ...] = tuple(map(constant_of, parts))
    if None in constants:
        return None
    return type(value), frozenset(constants) if isinstance(value, (set, frozenset)) else constants
