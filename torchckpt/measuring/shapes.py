"""Shapes: what the bytes of a step depend on: its tensors and flags, what is trained, modes, autocast."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any, TypeAlias
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchckpt.modules import imported

__all__ = ["ModelSettings", "Shapes", "shapes_of"]

Shapes: TypeAlias = tuple[Any, ...]
_trains, _requires_grad = attrgetter("training"), attrgetter("requires_grad")
_children, _own, _values = attrgetter("_modules"), attrgetter("_parameters"), methodcaller("values")


def shapes_of(*args: Any, **kwargs: Any) -> Shapes:
    """Of each tensor among arguments its size, dtype, device, and whether it requires a gradient; and flags, as text.
    If one is not where the number of those before says, as with a keyword, their places follow, as text."""
    if not kwargs and all(isinstance(value, Tensor) for value in args):
        return tuple(map(_shape_of, args))
    leaves = [(path, leaf) for path, leaf in _paths_in((args, kwargs)) if isinstance(leaf, (Tensor, bool))]
    shapes = tuple(_shape_of(leaf) if isinstance(leaf, Tensor) else f"{leaf}" for _, leaf in leaves)
    paths = tuple(path for path, _ in leaves)
    return shapes if paths == tuple(f"[0][{place}]" for place in range(len(leaves))) else (*shapes, _shown(paths))


def _shape_of(tensor: Tensor) -> Shapes:
    return *tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def _paths_in(tree: Any) -> list[tuple[str, Any]]:
    """Each leaf and its place; where a container does not tell places, only its number."""
    try:
        leaves, _ = pytree.tree_flatten_with_path(tree)
    except ValueError:
        return [(f"[0][{number}]", leaf) for number, leaf in enumerate(pytree.tree_leaves(tree))]
    return [(pytree.keystr(path), leaf) for path, leaf in leaves]


def _shown(paths: Collection[str]) -> str:
    return f"at {', '.join(path[3:] for path in paths)}"


class ModelSettings:
    """What else the bytes of a model's steps depend on. It does not hold the model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._modules: list[Callable[[], nn.Module | None]] = [lambda: None]  # they are looked for at first
        self._parameters: list[Callable[[], nn.Parameter | None]] = []
        self._places = self._sizes = 0

    def now(self, *kinds: str) -> Shapes:
        """The modes of all modules, their types, the sizes of parameters and which are trained, and the dtype of
        autocast on devices of ``kinds``."""
        flags = self._flags()
        if flags is None:
            self._look()
            flags = self._flags()
        return f"settings={flags}", *(f"autocast={_autocast(kind)}" for kind in kinds)

    def words(self, *kinds: str) -> dict[str, str]:
        """The same in words, by the names of what has them: for errors, as it takes longer."""
        model = self._model() or nn.Module()
        modes = {f"module {name!r}": "in training" if child.training else "in evaluation"
                 for name, child in model.named_modules()}
        trained = {f"parameter {name!r}": "trained" if parameter.requires_grad else "not trained"
                   for name, parameter in model.named_parameters()}
        sizes = {f"the size of {name!r}": f"{(*parameter.shape,)}" for name, parameter in model.named_parameters()}
        types = {f"the type of {name!r}": type(child).__name__ for name, child in model.named_modules()}
        autocast = {f"autocast of {kind}": f"{_autocast(kind)}" for kind in kinds}
        return {**trained, **modes, **sizes, **types, **autocast}

    @property
    def has_gradients(self) -> bool:
        """Whether a parameter has one already: the step need not make it."""
        parameters = (parameter() for parameter in self._parameters)
        return any(parameter is not None and parameter.grad is not None for parameter in parameters)

    @property
    def gathered(self) -> list[nn.Parameter]:
        """What FSDP2 has gathered of the model itself: it does that before any other hook of the model."""
        model, sharded = self._model(), imported("torch.distributed.fsdp", "FSDPModule")
        parameters = model.parameters() if isinstance(model, sharded) else ()
        return [parameter for parameter in parameters if not hasattr(parameter, "device_mesh")]

    def _look(self) -> None:
        model = self._model()
        modules = [] if model is None else [*model.modules()]
        parameters = [] if model is None else [*model.parameters()]
        self._modules = [weakref.ref(module) for module in modules]
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        # Numbers alone, whose hash is the same in all processes.
        sizes = ((len(each.shape), *each.shape, each.element_size()) for each in parameters)
        self._sizes = hash((*chain(*sizes), *(crc32(type(module).__qualname__.encode()) for module in modules)))
        self._places = _places(modules)

    def _flags(self) -> int | None:
        """The hash of the settings; None where a module or a parameter was added, taken away, or exchanged."""
        modules = [module() for module in self._modules]
        parameters = [parameter() for parameter in self._parameters]
        if id(None) in map(id, (*modules, *parameters)) or _places(modules) != self._places:
            return None
        return hash((*map(_trains, modules), *map(_requires_grad, parameters), self._sizes))


def _places(modules: Collection[Any]) -> int:
    """What is where in these modules: their children and their parameters."""
    held = map(_values, chain(map(_children, modules), map(_own, modules)))
    return hash((*map(id, chain.from_iterable(held)),))


def _autocast(kind: str) -> torch.dtype | None:
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None
