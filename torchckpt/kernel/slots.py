"""Slot: what a region's graph node holds instead of the tensor that it saved."""
from __future__ import annotations

import torch
from torch import Tensor

from torchckpt.errors import RecomputationError

__all__ = ["Slot", "describe", "fingerprint"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Slot:
    """The place of one saved tensor, and what is remembered of it for the replay to be held to.

    The graph node that saved the tensor owns the slot, so what fills it lives as long as eager's saved tensor would.
    """

    __slots__ = ("_version", "device", "dtype", "fingerprint", "shape", "tensor")

    def __init__(self, tensor: Tensor, values: bool) -> None:
        self.tensor: Tensor | None = None
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.fingerprint = fingerprint(tensor) if values else None

    def fill(self, tensor: Tensor) -> None:
        self.tensor, self._version = tensor, tensor._version

    def take(self) -> Tensor:
        """The tensor; raises, as eager autograd does, if it was changed in place after it was saved."""
        tensor = self.tensor
        if tensor is None:
            raise RecomputationError("a slot is empty after the replay of its region: this is a bug of torchckpt")
        if tensor._version != self._version:
            raise RecomputationError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"the {self}, saved inside a region, is at version {tensor._version}; expected version {self._version} "
                "instead\n  works:    the operation out of place, such as h = h + 1 instead of h.add_(1)"
            )
        return tensor

    def accepts(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` could be the one that the forward saved here."""
        if tensor.shape != self.shape or tensor.dtype != self.dtype or tensor.device != self.device:
            return False
        return self.fingerprint is None or self.fingerprint == fingerprint(tensor)

    def __str__(self) -> str:
        return describe(self)


def describe(tensor: Tensor | Slot) -> str:
    """Such as ``float32 (4, 8) on cpu``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"


def fingerprint(tensor: Tensor) -> int | None:
    """A checksum of the bits of ``tensor`` and of their places; None where there are no bits to read.

    It is the sum of the elements, read as integers, each times an odd number that depends on its place, modulo 2**64.
    """
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        return None
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.resolve_neg().contiguous().flatten()
    bits = flat.view(_INTEGERS[flat.element_size()]).to(torch.int64)
    odd = torch.arange(bits.numel(), device=bits.device) * 0x13C6EF372 + 1
    return int((bits * odd).sum())
