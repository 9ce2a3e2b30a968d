"""Result: what one call of ``keep`` returned and changed, for replays to find."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchckpt.errors import Fault, RecomputationError, raise_faults
from torchckpt.kernel.ambient import Generator, moved, put_back, random_state
from torchckpt.kernel.boundary import Boundary
from torchckpt.kernel.determinism import name_of
from torchckpt.kernel.layout import version_of
from torchckpt.kernel.module_state import Seen
from torchckpt.kernel.private import alive, set_version
from torchckpt.kernel.streams import Trail, accelerators_among
from torchckpt.kernel.trees import hides_tensors
from torchckpt.typing import Function

__all__ = ["Buffers", "Result", "buffers_of", "changed_buffers", "made"]


class _Outputs(Boundary):
    """The leaves of what a function returned: kept as the arguments of a region are."""

    __slots__ = ()

    _whose = "a result of torchckpt.keep"


class _Near:
    """Stands for an output that is one of the tensors near the call."""

    def __init__(self, place: int) -> None:
        self.place = place


class Result:
    """``again()`` hands out what the function returned, and leaves arguments and random numbers as it left them.

    The tensors *near* a call are those among its arguments, and those that its function holds.
    """

    __slots__ = ("_changed", "_near", "_outputs", "_random", "_spec", "_trail")

    def __init__(self, outputs: Any, near: Sequence[Tensor], versions: Sequence[int]) -> None:
        places = {id(tensor): place for place, tensor in enumerate(near)}
        leaves, self._spec = pytree.tree_flatten(outputs)
        self._outputs = _Outputs(tuple(_Near(places[id(e)]) if id(e) in places else e for e in leaves), {})
        self._near = len(near)
        self._changed = [
            (place, weakref.ref(tensor), _value(tensor), tensor.requires_grad)
            for place, (tensor, version) in enumerate(zip(near, versions))
            if version_of(tensor) != version
        ]
        self._random: list[tuple[Generator, Tensor]] = []
        devices = accelerators_among((outputs, near), {})
        self._trail = Trail(devices) if devices else None

    def after(self, random: list[tuple[Generator, Tensor]]) -> Result:
        """This, of a function that has moved the generators on from ``random``."""
        self._random = random_state(generator for generator, _ in moved(random))
        return self

    def again(self, function: Function, near: Sequence[Tensor], generators: Collection[Generator]) -> Any:
        """The outputs, for a replay that sees to ``generators``."""
        if len(near) != self._near:
            raise _other_arguments(function)
        leaves, _, tensors = self._outputs.arguments()
        if self._trail is not None:
            self._trail.followed(tensors)
        for place, original, value, requires_grad in self._changed:
            if alive(original) is not near[place]:
                _write(function, value(), near[place], requires_grad)
        put_back([(generator, state) for generator, state in self._random if generator in generators])
        return pytree.tree_unflatten([near[e.place] if isinstance(e, _Near) else e for e in leaves], self._spec)


def made(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], near: Sequence[Tensor], generators: Any
) -> tuple[Any, Result]:
    """``function(*args, **kwargs)``, and the result for replays that see to ``generators``."""
    versions, random = [version_of(tensor) for tensor in near], random_state(generators)
    outputs = function(*args, **kwargs)
    hidden = [leaf for leaf in pytree.tree_leaves(outputs) if hides_tensors(leaf)]
    if hidden:
        rule = f"{name_of(function)} must return tensors in pytrees: what is inside of other objects is out of sight"
        works = "return a tuple or a dict; or torch.export.register_dataclass(Routed)"
        raise_faults("keep", [Fault(rule, f"tensors in an object of {type(hidden[0]).__qualname__}", works)])
    return outputs, Result(outputs, near, versions).after(random)


def _value(tensor: Tensor) -> Callable[[], Tensor]:
    """What makes copies of ``tensor`` as it is now."""
    values, version = tensor.detach().clone(), version_of(tensor)
    return lambda: set_version(values.clone(), version)


def _write(function: Function, value: Tensor, tensor: Tensor, requires_grad: bool) -> None:
    if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
        raise _other_arguments(function)
    with torch.no_grad():
        tensor.detach().copy_(value)
    set_version(tensor, value._version)
    if requires_grad and not tensor.requires_grad:
        tensor.requires_grad_()


def _other_arguments(function: Function) -> RecomputationError:
    return RecomputationError(
        "the replay of a region called torchckpt.keep on other tensors than its forward\n"
        f"  received: {name_of(function)} with other arguments, or holding others, or with one that it resizes\n"
        "  works:    what it needs as arguments, keep(router, x), of the same shapes each time"
    )


# buffers ------------------------------------------------------------------------------------------------------------


Buffers: TypeAlias = dict[Any, tuple[Tensor | None, int]]
"""By their keys in a layout, with their versions."""


def buffers_of(seen: Seen | None) -> Buffers:
    """Those of the modules of a region, as they are now."""
    if seen is None:
        return {}
    return {key: (tensor, 0 if tensor is None else version_of(tensor)) for key, tensor in seen.layout.buffers()}


def changed_buffers(seen: Seen | None, before: Buffers) -> list[tuple[dict[str, Any], str, Callable[[], Any]]]:
    """Those that are others than ``before``: where each is, its name there, and what makes copies of it."""
    changed: list[tuple[dict[str, Any], str, Callable[[], Any]]] = []
    for key, (tensor, version) in buffers_of(seen).items():
        then = before.get(key)
        if seen is not None and (then is None or then[0] is not tensor or then[1] != version):
            changed.append((seen.layout.home(key), key[1], _none if tensor is None else _value(tensor)))
    return changed


def _none() -> None:
    return None
