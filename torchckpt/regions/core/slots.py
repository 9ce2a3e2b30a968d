"""Slots: the placeholders that graph nodes hold in place of saved tensors."""
from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from torchckpt.errors import RecomputationError
from torchckpt.regions.places import Place, place_of
from torchckpt.regions.private import set_version
from torchckpt.regions.state.ambient import is_made_here
from torchckpt.regions.state.norms import is_statistic
from torchckpt.tensors import lengths_in, with_lengths

__all__ = ["PlacedSlot", "Slot", "describe", "fingerprint", "sample"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**20


class Slot:
    """The placeholder of one saved tensor, with the properties that the replay's tensor must have.

    The graph node that saved the tensor owns the slot, so a recomputed tensor lives as long as a saved tensor in eager.
    """

    __slots__ = ("device", "dtype", "fingerprint", "ragged", "shape", "tensor", "version")
    place: Place | None = None
    operation = ""

    def __init__(self, tensor: Tensor, values: bool, sampled: bool = False) -> None:
        self.tensor: Tensor | None = None
        self.version = tensor._version  # when it was saved, in the forward and in the replay alike
        self.dtype, self.device, is_nested = tensor.dtype, tensor.device, tensor.is_nested
        self.shape = _shape_of(tensor) if is_nested else tensor.shape
        self.ragged = lengths_in(tensor) if is_nested else {}
        self.fingerprint = fingerprint(tensor) if values else sample(tensor) if sampled else None

    def unpack(self) -> Tensor:
        """Return the tensor. Raises, as eager autograd does, if it was changed in place after it was saved."""
        tensor = self.tensor
        if tensor is None:
            raise RecomputationError("a slot is empty after the replay of its region: this is a bug of torchckpt")
        if tensor._version != self.version:
            raise RecomputationError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"the {describe(self)}, saved inside a region, is at version {tensor._version}; expected version "
                f"{self.version} instead\n"
                "  works:    the operation out of place, such as h = h + 1 instead of h.add_(1)"
            )
        return tensor

    def of_forward(self, tensor: Tensor) -> Tensor:
        """``tensor``, saved by the replay; if it is jagged, with the offsets of the forward, where these are equal.
        Torch tells lengths apart by the tensor that holds them: a gradient has none but those of the forward."""
        is_same = not self.ragged or _shape_of(tensor) == self.shape
        return tensor if is_same else set_version(with_lengths(tensor, self.ragged), tensor._version)

    def accepts(self, tensor: Tensor, values: bool) -> bool:
        """Whether ``tensor``, saved by the replay, is as the forward saved it; with ``values``, its bits, too."""
        shape = _shape_of(tensor) if tensor.is_nested else tensor.shape
        if shape != self.shape or tensor.dtype != self.dtype or tensor.device != self.device:
            return False
        values = values and self.fingerprint is not None
        if tensor._version == self.version and not values:
            return True
        if is_statistic(tensor):
            return True  # a norm layer's buffers have moved on since the forward; its gradients do not depend on them
        if tensor._version == self.version or is_made_here(tensor):
            return not values or self._has_values_of(tensor)
        # What compiled code makes, such as `arange`, has other versions in the call that compiles, which has checksums.
        return isinstance(self.fingerprint, int) and self._has_values_of(tensor)

    def _has_values_of(self, tensor: Tensor) -> bool:
        then = self.fingerprint
        if not isinstance(then, Tensor):
            return then == fingerprint(tensor)
        now = sample(tensor)
        return now is not None and _is_near(then, now)

    def compare(self, tensor: Tensor) -> str:
        """Describe ``tensor`` and how it differs from this slot, for an error message."""
        words = describe(tensor)
        if words != describe(self):
            return words
        if tensor._version <= self.version:
            return f"{words}, {'with other values' if tensor._version == self.version else 'another tensor'}"
        return (
            f"{words}, modified by an inplace operation: it is at version {tensor._version}; expected version "
            f"{self.version}"
        )


class PlacedSlot(Slot):
    """A slot that knows where it was saved, and for which operation: the graph tells that when the forward is done."""

    __slots__ = ("operation", "place")

    def __init__(self, tensor: Tensor, values: bool, sampled: bool = False) -> None:
        super().__init__(tensor, values, sampled)
        self.place = place_of(sys._getframe(1).f_back)  # the caller of the hook that makes the slot
        self.operation = self.place.operation


def describe(tensor: Tensor | Slot) -> str:
    """Dtype, shape and device in words, such as ``float32 (4, 8) on cpu``."""
    shape = tensor.shape if isinstance(tensor, Slot) else _shape_of(tensor)
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(shape)} on {tensor.device}"


def _shape_of(tensor: Tensor) -> tuple[Any, ...]:
    try:
        return tensor.shape
    except RuntimeError:  # a nested tensor that is not jagged: each part has a shape
        return tuple(map(tuple, tensor._nested_tensor_size().tolist()))


def fingerprint(tensor: Tensor) -> int | None:
    """A checksum of the bits of ``tensor`` and of their positions; None if its bits cannot be read.

    The checksum is a sum modulo 2**64 with one term for each element. The term mixes the bits of the element, read as
    an integer, with its position, so that a change of any bit of either can change every bit of the term.
    """
    if not _is_read(tensor):
        return None
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.resolve_neg().contiguous().flatten()
    integers = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for first in range(0, flat.numel(), _CHUNK):  # in chunks: the temporaries are several times as large as the chunk
        bits = integers[first : first + _CHUNK].to(torch.int64)
        bits = bits + torch.arange(first, first + bits.numel(), device=bits.device) * 0x1E3779B97F4A7C15
        for _ in range(2):  # the steps of MurmurHash3's finalizer: shift, exclusive or, multiply
            bits ^= _high(bits)
            bits *= 0x7F51AFD7ED558CCD
        total += (bits ^ _high(bits)).sum()
    return int(total)


def sample(tensor: Tensor) -> Tensor | None:
    """A few elements of ``tensor``: at every quarter of each dimension, and its last. None where bits cannot be read,
    and of bytes, which are work space that a kernel need not fill.

    It costs two small kernels where a checksum costs several passes, and nobody waits for the device.
    """
    if not _is_read(tensor) or tensor.dtype is torch.uint8:
        return None
    steps = [max(1, size // 4) for size in tensor.shape]
    places = tuple(slice((size - 1) % step, None, step) for size, step in zip(tensor.shape, steps))
    taken = tensor.detach()[places]
    return torch.view_as_real(taken.resolve_conj()).clone() if taken.is_complex() else taken.clone()


def _is_near(then: Tensor, now: Tensor) -> bool:
    """Whether two samples are the same, but for what a kernel makes of them that adds in another order."""
    if not then.is_floating_point() or not then.numel():
        return torch.equal(then, now)
    then, now = then.float(), now.float()
    most = float(then.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(then, now, rtol=0.02, atol=0.02 * most, equal_nan=True)


def _is_read(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return is_plain and not (tensor.is_meta or tensor.is_nested)


def _high(bits: Tensor) -> Tensor:
    """The upper 31 bits. The shift of an int64 repeats the sign, by which a number and its complement would be one."""
    return (bits >> 33) & 0x7FFFFFFF
