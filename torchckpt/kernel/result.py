"""Result: what one call of ``keep`` returned and changed, for replays to find."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
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
from torchckpt.kernel.private import alive, apply_of, set_version
from torchckpt.kernel.streams import Trail, accelerators_among
from torchckpt.kernel.trees import copy_attributes, hides_tensors
from torchckpt.typing import Function

__all__ = ["Buffers", "Result", "buffers_of", "changed_buffers"]


class _Outputs(Boundary):
    """The leaves of what a function returned: kept as the arguments of a region are."""

    __slots__ = ()

    _whose = "a result of torchckpt.keep"


class _Near:
    """Stands for an output that is one of the tensors near the call."""

    def __init__(self, place: int) -> None:
        self.place = place


class Result:
    """Made before the function is called. ``note()`` what it returned, and ``again()`` hands that out, and leaves
    arguments and random numbers as the function left them.

    The tensors *near* a call are those among its arguments, and those that its function holds.
    """

    __slots__ = ("_changed", "_moved", "_outputs", "_random", "_spec", "_trail", "_versions")

    def __init__(self, near: Sequence[Tensor], generators: Sequence[Generator]) -> None:
        self._versions = [version_of(tensor) for tensor in near]
        self._random = random_state(dict.fromkeys(generators))

    def note(self, function: Function, outputs: Any, near: Sequence[Tensor]) -> None:
        """What ``function`` has returned, and left."""
        leaves, self._spec = pytree.tree_flatten(outputs)
        _must_be_seen(function, leaves)
        places = {id(tensor): place for place, tensor in enumerate(near)}
        self._outputs = _Outputs(tuple(_Near(places[id(e)]) if id(e) in places else e for e in leaves), {})
        self._changed = [
            (place, weakref.ref(tensor), _value(tensor), tensor.requires_grad)
            for place, (tensor, version) in enumerate(zip(near, self._versions))
            if version_of(tensor) != version
        ]
        self._moved = [(generator, before, generator.get_state()) for generator, before in moved(self._random)]
        self._random = []
        devices = accelerators_among((outputs, near), {})
        self._trail = Trail(devices) if devices else None

    def again(self, function: Function, near: Sequence[Tensor], replays: Callable[[Generator, Tensor], bool]) -> Any:
        """What it returned. ``replays`` says of a generator, and its state before, whether the replay sees to it."""
        if len(near) != len(self._versions):
            raise _other_arguments(function)
        leaves, _, tensors = self._outputs.arguments()
        if self._trail is not None:
            self._trail.followed(tensors)
        for place, original, value, requires_grad in self._changed:
            if alive(original) is not near[place]:
                _write(function, value(), near[place], requires_grad)
        put_back([(generator, after) for generator, before, after in self._moved if replays(generator, before)])
        behind = {id(leaf): _behind(function, leaf, near) for leaf in tensors}
        outputs = [near[e.place] if isinstance(e, _Near) else behind.get(id(e), e) for e in leaves]
        return pytree.tree_unflatten(outputs, self._spec)


class _Once(torch.autograd.Function):
    """In a replay, between what a kept function got and what it returned: no gradient goes there."""

    @staticmethod
    def forward(ctx: Any, function: Function, output: Tensor, *near: Tensor) -> Tensor:
        ctx.function = function
        return output.detach()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        raise RecomputationError(
            "a backward inside of a region cannot go through what torchckpt.keep keeps\n"
            f"  received: the gradient of a result of {name_of(ctx.function)}, in a replay\n"
            "  works:    the function, and the backward through it, in one keep(); or the function without keep()"
        )


_once = apply_of(_Once)


def _behind(function: Function, output: Tensor, near: Sequence[Tensor]) -> Tensor:
    graded = [tensor for tensor in near if tensor.requires_grad]
    if output.is_leaf or not graded or not torch.is_grad_enabled():
        return output
    return set_version(copy_attributes(output, _once(function, output, *graded)), output._version)


def _must_be_seen(function: Function, leaves: Sequence[Any]) -> None:
    hidden = [leaf for leaf in leaves if hides_tensors(leaf)]
    if hidden:
        rule = f"{name_of(function)} must return tensors in pytrees: what is inside of other objects is out of sight"
        works = "return a tuple or a dict; or torch.export.register_dataclass(Routed)"
        raise_faults("keep", [Fault(rule, f"tensors in an object of {type(hidden[0]).__qualname__}", works)])


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
