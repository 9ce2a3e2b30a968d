"""Layout: where the modules of a region's function keep their parameters, buffers and generators."""
from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchckpt.kernel.norms import updates
from torchckpt.kernel.private import norm_layer, set_version
from torchckpt.typing import Function

__all__ = ["Copy", "Key", "Layout", "Modules", "layout_of", "values_of", "version_of"]

Key: TypeAlias = tuple[int, str]
"""A buffer: the place of its module in a layout, and its name there."""


class Copy:
    """A buffer as it was at one version: ``values``, or None where it is too large to be kept."""

    __slots__ = ("_buffer", "values", "version")

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = weakref.ref(buffer)
        self.version = version_of(buffer)
        self.values: Tensor | None = buffer.detach().clone()

    def again(self) -> Tensor:
        """The buffer as it was, for a replay to change."""
        assert self.values is not None
        return set_version(self.values.clone(), self.version)

    def is_of(self, buffer: Tensor) -> bool:
        """Whether ``buffer`` has not changed since."""
        return self._buffer() is buffer and self.version == version_of(buffer)


class Modules(tuple[nn.Module, ...]):
    """The modules of a function that is none itself, as its attribute ``region_modules``."""

    layout: Layout | None = None
    """Of a call before."""


class _End:
    """Stands behind the values of one kind, so that one more of them is seen."""

    _version = 0


class Layout:
    """Of some modules and those inside them, as they are now. It keeps the former alive no longer than they are.

    A norm layer's buffers are left out while it updates them: ``norms.py`` sees to those.
    """

    def __init__(self, owners: Sequence[nn.Module]) -> None:
        modules = list(dict.fromkeys(chain.from_iterable(owner.modules() for owner in owners)))
        self.owners = [weakref.ref(owner) for owner in owners]
        self.parameters: list[dict[str, Any]] = [module._parameters for module in modules]
        self.copies: dict[Key, Copy] = {}
        self.changing: set[Key] = set()
        """Buffers that a forward has changed, or left another in the place of."""
        self.unversioned: set[Key] = set()
        """Those of them that are changed past their version counter, as by ``.data``."""
        inside: list[dict[str, Any]] = [module._modules for module in modules]
        end: dict[str, Any] = {"": _End()}
        self.children = values_of([*inside, end])
        self._buffers: list[dict[str, Any]] = [module._buffers for module in modules]
        self._norms = {place: weakref.ref(m) for place, m in enumerate(modules) if isinstance(m, norm_layer)}
        others = [buffers for place, buffers in enumerate(self._buffers) if place not in self._norms]
        self.tables: list[dict[str, Any]] = [*inside, end, *self.parameters, end, *others]
        """All that is compared at each call: the children, the parameters, the buffers of what is no norm layer."""
        self.without_buffers = len(values_of(self.tables[: -len(others)] if others else self.tables))
        self._attributes = [(len(modules) + n, vars(m), _names_of_tensors(m)) for n, m in enumerate(modules)]
        self._attributes = [found for found in self._attributes if found[2]]
        self.is_simple = not self._norms and not self._attributes
        """Whether ``tables`` has all that there is."""
        self.is_lazy = any(is_lazy(value) for value in values_of([*self.parameters, *self._buffers]))
        """Whether a parameter or buffer has no shape yet: the first call gives it one."""
        self._generators = [(vars(module), name) for module in modules for name in _names_of_generators(module)]

    def buffers(self) -> Iterator[tuple[Key, Tensor | None]]:
        """The buffers, and the tensors that are plain attributes of modules (old hooks put weights there)."""
        for place, buffers in enumerate(self._buffers):
            if buffers and not (place in self._norms and self._is_updated(self._norms[place]())):
                for name, tensor in buffers.items():
                    yield (place, name), tensor
        for place, attributes, names in self._attributes:
            for name in names:
                if isinstance(tensor := attributes.get(name), Tensor):
                    yield (place, name), tensor

    def home(self, key: Key) -> dict[str, Any]:
        """The dictionary that has a buffer under its name."""
        if key[0] < len(self._buffers):
            return self._buffers[key[0]]
        return next(attributes for place, attributes, _ in self._attributes if place == key[0])

    def generators(self) -> list[torch.Generator]:
        """Those that modules have as attributes."""
        if not self._generators:
            return []
        found = (attributes.get(name) for attributes, name in self._generators)
        return [generator for generator in found if isinstance(generator, torch.Generator)]

    def path_of(self, tensor: Tensor) -> str:
        """The name of a parameter or buffer, with the class of the module."""
        for owner in filter(None, (reference() for reference in self.owners)):
            for name, one in chain(owner.named_parameters(), owner.named_buffers()):
                if one is tensor:
                    return f"{type(owner).__name__}.{name}"
        return "a tensor of its modules"

    @staticmethod
    def _is_updated(norm: nn.Module | None) -> bool:
        return norm is not None and updates(norm)


_layouts: dict[Any, Layout] = {}


def layout_of(function: Function, args: Sequence[Any] = ()) -> tuple[Layout, list[Any]] | None:
    """Of the modules that ``function`` is, is a method of, or names as its own (``region_modules``), through partials,
    and of those among its arguments; with the values of its tables. None if there are no such modules.

    Made at the first call, and again when there are other modules inside than then. Modules that a function closes over
    are not seen.
    """
    kind = type(function)
    if not args and (kind is BuiltinFunctionType or (kind is FunctionType and not function.__dict__)):
        return None
    owner = getattr(function, "__self__", None) if kind is MethodType else function
    layout, modules = _layouts.get(id(owner)), None
    if layout is None and not isinstance(owner, nn.Module):
        modules = getattr(owner, "region_modules", None)
        layout = None if modules is None else modules.layout
    if layout is None or args or (modules is None and layout.owners[0]() is not owner):
        owners = _owners(function, args)
        if not owners:
            return None
        layout = _known(owners)
        if modules is not None and not (args or layout.is_lazy):
            modules.layout = layout
    values = values_of(layout.tables)
    if values[: len(layout.children)] == layout.children:  # modules are equal if they are the same
        return layout, values
    layout = _made([owner for reference in layout.owners if (owner := reference()) is not None])
    if modules is not None and not (args or layout.is_lazy):
        modules.layout = layout
    return layout, values_of(layout.tables)


def _known(owners: Sequence[nn.Module]) -> Layout:
    layout = _layouts.get(_key(owners))
    if layout is None or not all(reference() is owner for reference, owner in zip(layout.owners, owners)):
        return _made(owners)
    return layout


def _key(owners: Sequence[nn.Module]) -> int | tuple[int, ...]:
    return id(owners[0]) if len(owners) == 1 else tuple(map(id, owners))


def _made(owners: Sequence[nn.Module]) -> Layout:
    layout, key = Layout(owners), _key(owners)
    if not layout.is_lazy:
        _layouts[key] = layout
        for owner in owners:
            weakref.finalize(owner, _layouts.pop, key, None).atexit = False
    return layout


def _owners(function: Function, args: Sequence[Any]) -> list[nn.Module]:
    owners = [arg for arg in args if isinstance(arg, nn.Module)]
    if isinstance(function, functools.partial):
        return _owners(function.func, [*function.args, *owners])
    function = getattr(function, "_torchdynamo_orig_callable", function) if type(function) is FunctionType else function
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        return [owner, *owners]
    modules: Modules = getattr(function, "region_modules", Modules())
    return [*modules, *owners]


def values_of(tables: Iterable[dict[str, Any]]) -> list[Any]:
    """All values of ``tables``, in order."""
    return list(chain.from_iterable(map(_VALUES, tables)))


_VALUES: Callable[[dict[str, Any]], Iterable[Any]] = dict.values


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _names_of_tensors(module: nn.Module) -> list[str]:
    return [name for name, value in vars(module).items() if isinstance(value, Tensor)]


def _names_of_generators(module: nn.Module) -> list[str]:
    """Of attributes that hold a generator, or will by their name."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, torch.Generator) or (value is None and "generator" in name)
    ]
