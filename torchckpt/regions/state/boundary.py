"""Boundary: the arguments of a region, which stay in memory between its forward and its replay."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchckpt.modules import is_module
from torchckpt.regions.private import (
    alive,
    hooks_in_force,
    mutation_is_allowed,
    set_grad_enabled,
    set_version,
    storage_key,
)
from torchckpt.regions.state.ambient import Generator
from torchckpt.regions.state.host_random import generators_in
from torchckpt.tensors import ATOMS, attributes_of, copy_attributes, hidden_tensors, is_iterator, of_class

__all__ = ["Boundary", "Hooks", "generators_among"]

_ATOMS = ATOMS | {bytes, torch.dtype, torch.device}
_LEAVES = _ATOMS | {Tensor, nn.Parameter}

Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What packs a saved tensor, and what unpacks it."""


class Boundary:
    """The arguments of one call. A tensor that is passed several times is one and the same tensor in the replay, too.

    An autograd Function with ``save_for_backward`` could keep the tensors instead. Its graph node would be a fifth of
    the cost of a region of tiny operations.
    """

    __slots__ = ("_leaves", "spec")

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        leaves: Sequence[Any] = args
        self.spec: pytree.TreeSpec | None = None
        """The structure of the arguments; None if all are tensors or atoms and are passed by position, as mostly."""
        if kwargs or not _LEAVES.issuperset(map(type, args)):
            leaves, self.spec = pytree.tree_flatten((args, dict(kwargs)))
        hooks = hooks_in_force(False)  # False: none in a trace of AOTAutograd, which defers them
        inputs: dict[int, Input] = {}
        self._leaves: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                tensor, key = leaf, id(leaf)
                if (leaf := inputs.get(key)) is None:
                    leaf = inputs[key] = Input(tensor, hooks)
            self._leaves.append(leaf)

    def arguments(
        self, whose: str = "an input of a checkpointed region"
    ) -> tuple[Sequence[Any], dict[str, Any], Collection[Tensor]]:
        """``(args, kwargs)`` for a replay, and the tensors in them, each once.

        Raises ``RuntimeError``, as eager autograd does, if a tensor was changed in place since the forward. The error
        calls the tensor ``whose``.
        """
        tensors: dict[Input, Tensor] = {}
        leaves = []
        for leaf in self._leaves:
            if type(leaf) is Input:
                held = leaf
                if (leaf := tensors.get(held)) is None:
                    leaf = tensors[held] = held.unpack(whose)
            leaves.append(leaf)
        args, kwargs = (leaves, {}) if self.spec is None else pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs, tensors.values()

    def drop_graphs(self) -> None:
        """Hold no graph by the attributes of tensors: one there may come from the region whose frame holds this."""
        for leaf in self._leaves:
            if type(leaf) is Input and leaf._attributes is not None:
                values = leaf._attributes.items()
                grown = {name: value for name, value in values if isinstance(value, Tensor) and value.grad_fn}
                leaf._attributes.update({name: value.detach() for name, value in grown.items()})

    def modules(self) -> list[nn.Module]:
        """The modules among the arguments."""
        return [leaf for leaf in self._leaves if is_module(leaf)]

    def hidden_tensors(self) -> list[Tensor]:
        """The tensors that objects among the arguments hold, such as a cache."""
        objects = [leaf for leaf in self._leaves if type(leaf) is not Input and type(leaf) not in _ATOMS]
        return list(chain.from_iterable(map(hidden_tensors, objects)))

    def iterators(self) -> list[Any]:
        """The iterators of Python's among the arguments: what a forward takes from one, no replay finds in it."""
        return [leaf for leaf in self._leaves if type(leaf) not in _LEAVES and is_iterator(leaf)]

    def generators(self) -> list[Generator]:
        """The generators among the arguments, and those that are attributes of an argument."""
        return generators_among([leaf for leaf in self._leaves if type(leaf) is not Input])


class Input:
    """A tensor among the arguments of a region.

    It is saved as autograd saves: through the saved-tensor hooks in force. Without hooks, a leaf that requires grad is
    held itself, and any other tensor without its graph. A read checks that it was not changed in place. A replay gets
    the original tensor while it is alive, and later a twin, which is a leaf or not as the original, and has the same
    attributes. A parameter is held itself, because a twin would not be that parameter. An inference tensor cannot be
    saved, and has no version to check: a copy is held.
    """

    def __init__(self, tensor: Tensor, hooks: Hooks | None) -> None:
        if tensor.is_inference():
            self._version, self._attributes = -1, None
            with torch.inference_mode():
                is_weight = isinstance(tensor, nn.Parameter)
                copy = tensor if is_weight else copy_attributes(tensor, of_class(tensor.__class__, tensor.clone()))
                self._kept: Any = copy
            return
        self._version = tensor._version
        self._requires_grad = requires_grad = tensor.requires_grad
        self._is_non_leaf = is_non_leaf = requires_grad and not tensor.is_leaf
        self._attributes = tensor.__dict__.copy() if tensor.__dict__ else None
        self._class = tensor.__class__
        self._unpack: Callable[[Any], Tensor] | None = None
        self._original: weakref.ref[Tensor] | None = None
        """None if ``_kept`` is the tensor itself."""
        # A leaf that requires grad stays a leaf: in-place operations cannot give it a graph.
        is_fixed = requires_grad and not is_non_leaf and hooks is None
        if is_fixed or (tensor.__class__ is not Tensor and isinstance(tensor, nn.Parameter)):
            self._kept = tensor
            return
        self._original = weakref.ref(tensor)
        if hooks is None:
            self._kept = tensor.detach()
        else:
            with torch.no_grad():
                self._kept = hooks[0](tensor)
            self._unpack, self._strides = hooks[1], tensor.stride() if _has_strides(tensor) else None

    def unpack(self, whose: str) -> Tensor:
        """The tensor, or its twin. Raises ``RuntimeError`` if it was changed in place; the error calls it ``whose``."""
        if self._version < 0:
            inference: Tensor = self._kept
            return inference
        # What is packed is unpacked once.
        kept: Tensor = self._kept if self._unpack is None else self._unpack(self._kept)
        original = kept if self._original is None else alive(self._original)
        if original is not None and self._is_as_it_was(original, kept):
            if original._version == self._version:
                return original
            if self._unpack is None or storage_key(kept) == storage_key(original):
                return self._changed(original, whose)  # else the hooks have kept its values
        if self._unpack is None and kept._version != self._version:
            return self._changed(kept, whose)
        if self._unpack is None:
            return self._twin(kept if original is not kept else kept.detach())
        return self._twin(_laid_out(kept.detach(), self._strides))

    def _is_as_it_was(self, original: Tensor, kept: Tensor) -> bool:
        """Whether ``original`` still has the data and attributes of the forward, and is a leaf or not as then."""
        if original.requires_grad != self._requires_grad:
            return False
        if (self._attributes is not None or original.__dict__) and not self._has_attributes_of(original):
            return False
        if not self._is_non_leaf:  # a leaf with new data: eager autograd would see it, too
            return True
        if self._unpack is not None or not _has_strides(original):
            return not original.is_leaf
        return not original.is_leaf and original.is_set_to(kept)

    def _has_attributes_of(self, original: Tensor) -> bool:
        then, now = self._attributes or {}, original.__dict__
        return then.keys() == now.keys() and all(now[name] is value for name, value in then.items())

    def _twin(self, twin: Tensor) -> Tensor:
        twin = of_class(self._class, twin)
        if self._requires_grad:
            twin.requires_grad_()
        if self._is_non_leaf:
            twin = _behind_a_node(twin)
        elif mutation_is_allowed():
            twin = of_class(self._class, twin.detach().clone()).requires_grad_(self._requires_grad)
        if self._attributes is not None:
            twin.__dict__.update(self._attributes)
        return set_version(twin, self._version)

    def _changed(self, tensor: Tensor, whose: str) -> NoReturn:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{whose}, [{tensor.type()} {list(tensor.shape)}], is at version {tensor._version}; "
            f"expected version {self._version} instead. The replay would start from the changed tensor.\n"
            "  works:    the operation out of place, such as x = x + 1 instead of x.add_(1)"
        )


def _has_strides(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def _laid_out(tensor: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """``tensor``, of which hooks have made a copy, with the strides from before. If there were gaps, without them."""
    if strides is None or tensor.stride() == strides or tensor.dim() != len(strides):
        return tensor
    then = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")
    if tensor.numel() and then.untyped_storage().nbytes() != then.nbytes:
        strides = torch.empty_like(then).stride()
        if tensor.stride() == strides:
            return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _behind_a_node(leaf: Tensor) -> Tensor:
    """``leaf`` as a non-leaf tensor: a view. An autograd Function would take four times as long.

    Its strides are those of ``leaf``. ``view_as`` would make those of dimensions of size one anew, and a convolution
    reads from them whether a batch of one is channels last.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return _behind_a_node(leaf)
    graded = torch.is_grad_enabled()
    set_grad_enabled(True)
    try:
        if _has_strides(leaf) and not mutation_is_allowed():
            return of_class(leaf.__class__, leaf[...])
        return leaf.expand_as(leaf) if leaf.layout == torch.jagged else of_class(leaf.__class__, leaf.clone())
    finally:
        set_grad_enabled(graded)


def generators_among(leaves: Iterable[Any]) -> list[Generator]:
    """The generators among ``leaves`` of a tree, and those that are attributes of one."""
    objects = [leaf for leaf in leaves if type(leaf) not in _ATOMS]
    return generators_in(chain(objects, chain.from_iterable(map(attributes_of, objects))))
