"""Slot: the place of one saved tensor of a region that moves, and how the tensor is put together again.

A tensor is a view of a storage, or a wrapper around such (a DTensor, a jagged tensor). Storages move whole. A view is
set anew on the bytes that came back, at the same offset and with the same strides. The allocators of accelerators begin
each storage at a multiple of 512 bytes, so kernels find the same alignment, and do the same sums.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchckpt.errors import Fault, RecomputationError
from torchckpt.regions.core.slots import Slot, describe
from torchckpt.regions.moved.copies import Bytes, goes_from
from torchckpt.regions.private import negated, set_version, storage_key
from torchckpt.regions.saved import has_no_graph
from torchckpt.regions.state.boundary import Hooks
from torchckpt.tensors import node_name

__all__ = ["MovedSlot", "parts_of", "parts_that_go", "stays"]

_ALIGNED_BYTES = 64


class MovedSlot(Slot):
    """The place of one saved tensor. It holds the tensor until the storages are let go, and when they are back."""

    __slots__ = ("__weakref__", "_again", "storages", "stream")

    def __init__(self, tensor: Tensor, stream: torch.Stream | None = None) -> None:
        super().__init__(tensor, False)
        self.tensor = tensor if tensor.requires_grad and has_no_graph(tensor) else tensor.detach()
        self.storages: list[Bytes] = []
        """Those of the tensor that move."""
        self.stream = stream
        """The stream that was current when it was saved."""
        self._again: Callable[[], Tensor] | None = None
        """Puts the tensor together again."""

    @property
    def is_changed(self) -> bool:
        """Whether the tensor was changed in place after it was saved."""
        return self.tensor is not None and self.tensor._version != self.version

    def save_by(self, hooks: Hooks | None, tensor: Tensor) -> None:
        """Save ``tensor``, which stays, as the hooks around the region do."""
        if hooks is not None:
            with torch.no_grad():
                self._again, self.tensor = partial(hooks[1], hooks[0](tensor)), None

    def let_go(self) -> None:
        """Hold the storages alone."""
        storages = {storage_key(each.memory): each for each in self.storages}
        self._again, self.tensor = _maker(self.tensor, storages), None

    def unpack(self) -> Tensor:
        for storage in self.storages:
            if storage.is_resized:
                rule = "the storage of a saved tensor has got another size, or other memory, before it was let go of"
                received = f"the {describe(self)}, saved inside a region of torchckpt.offload"
                works = "a new tensor in place of storage.resize_; or the same after the backward"
                raise RecomputationError(str(Fault(rule, received, works)))
            storage.copies.fetch([storage])  # late, if it is on the host
            storage.wait()
        if self._again is None:
            return super().unpack()
        tensor = self._again()
        if self.storages:
            # A replay gets twins of it that count changes with it, from this version on.
            self._again, self.tensor = None, set_version(tensor, self.version)
        return tensor


# what stays -----------------------------------------------------------------------------------------------------------


def stays(tensor: Tensor, least_bytes: int) -> bool:
    """Whether ``tensor`` stays on its device, whoever else holds it: parameters and their views, what autocast makes of
    them, leaves that require grad, and all that is small, on the host, or no dense memory."""
    whole = tensor if tensor._base is None else tensor._base
    is_leaf = tensor.requires_grad and has_no_graph(tensor)
    if is_leaf or isinstance(whole, nn.Parameter) or _is_cast_of_parameter(whole):
        return True
    return not parts_that_go(tensor, least_bytes)


def _is_cast_of_parameter(tensor: Tensor) -> bool:
    node: Any = tensor.grad_fn
    is_cast = node is not None and node_name(node) == "ToCopyBackward0"
    return is_cast and isinstance(getattr(node.next_functions[0][0], "variable", None), nn.Parameter)


def parts_that_go(tensor: Tensor | None, least_bytes: int) -> list[Tensor]:
    """The parts of ``tensor`` whose storages may go to the host."""
    return [] if tensor is None else [part for part in parts_of(tensor) if _goes(part, least_bytes)]


def _goes(part: Tensor, least_bytes: int) -> bool:
    if not goes_from(part.device) or part.layout != torch.strided or part.is_quantized or part.is_nested:
        return False
    storage = part.untyped_storage()
    # Memory that no allocator of torch has made may begin anywhere.
    return storage.nbytes() >= max(least_bytes, 1) and storage.data_ptr() % _ALIGNED_BYTES == 0


# taken apart, and put together ----------------------------------------------------------------------------------------


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory of their own that ``tensor`` consists of: itself, or those inside of a wrapper."""
    if type(tensor) is Tensor:
        yield tensor
    for name in _inner_names(tensor):
        yield from parts_of(getattr(tensor, name))


def _inner_names(tensor: Tensor) -> list[str]:
    """The names of the tensors inside of a wrapper; none for other tensors."""
    if type(tensor) is Tensor or not hasattr(tensor, "__tensor_flatten__"):
        return []
    if tensor.layout == torch.jagged:  # torch knows the sizes by the tensor of the offsets itself
        return ["_values"]
    names: list[str] = tensor.__tensor_flatten__()[0]
    return [name for name in names if isinstance(getattr(tensor, name), Tensor)]


def _maker(tensor: Any, storages: Mapping[int | None, Bytes]) -> Callable[[], Any]:
    """A function that makes ``tensor`` again, of the bytes of ``storages`` and of what stays."""
    names = _inner_names(tensor)
    if names:
        inner, context = tensor.__tensor_flatten__()
        makers = {name: _maker(getattr(tensor, name), storages if name in names else {}) for name in inner}
        if hasattr(tensor, "device_mesh"):
            make, local = _dtensor_like(tensor), makers[names[0]]
            return lambda: make(local())
        return partial(_wrapper, type(tensor), makers, context, tensor.size(), tensor.stride())
    storage = storages.get(storage_key(tensor)) if type(tensor) is Tensor else None
    if storage is None:
        return lambda: tensor
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    return partial(_view, storage, tensor.dtype, place, tensor.is_conj(), tensor.is_neg())


def _dtensor_like(tensor: Any) -> Callable[[Tensor], Tensor]:
    """What makes a DTensor of what this rank holds, laid out as ``tensor``. No public form: ``__tensor_unflatten__`` of
    torch 2.13 (torch/distributed/tensor/_api.py) refuses views that flatten a sharded dimension."""
    of, spec, requires_grad = type(tensor), tensor._spec, tensor.requires_grad
    return lambda local: of(local, spec, requires_grad=requires_grad)


def _wrapper(of: Any, makers: dict[str, Callable[[], Any]], context: Any, *shape: Any) -> Tensor:
    wrapper: Tensor = of.__tensor_unflatten__({name: make() for name, make in makers.items()}, context, *shape)
    return wrapper


def _view(storage: Bytes, dtype: torch.dtype, place: Any, is_conjugated: bool, is_negated: bool) -> Tensor:
    whole = storage.memory
    view = torch.empty(0, dtype=dtype, device=whole.device).set_(whole.untyped_storage(), *place)
    view = view.conj() if is_conjugated else view
    return negated(view) if is_negated else view
