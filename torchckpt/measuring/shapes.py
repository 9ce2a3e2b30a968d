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


def shapes_of(*tree: Any) -> Shapes:
    """Of each tensor in ``tree`` its size, dtype, device, and whether it requires a gradient; and flags, as text."""
    leaves = tree if all(isinstance(value, Tensor) for value in tree) else pytree.tree_leaves(tree)
    return tuple(
        (*leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad) if isinstance(leaf, Tensor) else f"{leaf}"
        for leaf in leaves
        if isinstance(leaf, (Tensor, bool))
    )


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
