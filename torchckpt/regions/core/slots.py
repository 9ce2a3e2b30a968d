"""Slots: the placeholders that graph nodes hold in place of saved tensors, and the errors of a replay that differs."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchckpt.errors import RecomputationError
from torchckpt.modules import name_of
from torchckpt.regions.state.ambient import is_made_here
from torchckpt.regions.state.norms import is_statistic
from torchckpt.typing import Function

__all__ = ["Slot", "compiled_anew", "describe", "differs", "fingerprint", "keeps_differently"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**20


class Slot:
    """The placeholder of one saved tensor, with the properties that the replay's tensor must have.

    The graph node that saved the tensor owns the slot, so a recomputed tensor lives as long as a saved tensor in eager.
    """

    __slots__ = ("device", "dtype", "fingerprint", "shape", "tensor", "version")

    def __init__(self, tensor: Tensor, values: bool) -> None:
        self.tensor: Tensor | None = None
        self.version = tensor._version  # when it was saved, in the forward and in the replay alike
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.fingerprint = fingerprint(tensor) if values else None

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

    def accepts(self, tensor: Tensor, values: bool) -> bool:
        """Whether ``tensor``, saved by the replay, is as the forward saved it; with ``values``, those, too."""
        if tensor.shape != self.shape or tensor.dtype != self.dtype or tensor.device != self.device:
            return False
        values = values and self.fingerprint is not None
        if tensor._version == self.version and not values:
            return True
        # A norm layer's buffers have moved on since the forward; its gradients do not depend on them.
        return is_statistic(tensor) or (
            (tensor._version == self.version or is_made_here(tensor))
            and (not values or self.fingerprint == fingerprint(tensor))
        )

    def compare(self, tensor: Tensor) -> str:
        """Describe ``tensor`` and how it differs from this slot, for an error message."""
        words = describe(tensor)
        if words != describe(self):
            return words
        if tensor._version == self.version:
            return f"{words}, with other values"
        return (
            f"{words}, modified by an inplace operation: it is at version {tensor._version}; expected version "
            f"{self.version}"
        )


def describe(tensor: Tensor | Slot) -> str:
    """Dtype, shape and device in words, such as ``float32 (4, 8) on cpu``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"


def fingerprint(tensor: Tensor) -> int | None:
    """A checksum of the bits of ``tensor`` and of their positions; None if its bits cannot be read.

    The checksum is a sum modulo 2**64 with one term for each element. The term mixes the bits of the element, read as
    an integer, with its position, so that a change of any bit of either can change every bit of the term.
    """
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
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
            bits ^= bits >> 33
            bits *= 0x7F51AFD7ED558CCD
        total += (bits ^ (bits >> 33)).sum()
    return int(total)


# a replay that differs ------------------------------------------------------------------------------------------------

_CAUSES = """\
Likely causes, each with its fix:
  - state that the function changes itself (a counter, a cache): change it under `if not torchckpt.is_recomputing():`
  - random numbers of a generator that is not replayed: name it, checkpoint(function, x, generators=(generator,))
  - a parameter, buffer or global that changed between forward and backward: change it after the backward
  - a context that held around the forward only (sdpa_kernel, a tensor mode): enter it inside, or by context_fn
  - a function that is free to choose: determinism_check="none", if every choice has the same gradients"""

_WRITTEN = """
  - a tensor from outside that the function itself writes (out=, clamp_): make it inside of the function, or a parameter
    or buffer of a module, checkpoint(module, x)"""


def differs(function: Function, slots: Sequence[Slot], place: int, replay: str) -> RecomputationError:
    """The error for saved tensor ``place`` (from 0); ``replay`` describes what was saved for it, if anything was."""
    nothing = "nothing, it had ended"
    return RecomputationError(
        f"the replay of region {name_of(function)} did not save what its forward saved\n"
        f"  first to differ: saved tensor {place + 1} of {len(slots)}\n"
        f"  forward saved:   {describe(slots[place]) if place < len(slots) else nothing}\n"
        f"  replay saved:    {replay or nothing}\n{_CAUSES}{_WRITTEN if 'inplace operation' in replay else ''}"
    )


def compiled_anew(function: Function) -> RecomputationError:
    """The error for a replay inside of which code was compiled, with nothing to compare what it saves with."""
    return RecomputationError(
        f"the replay of region {name_of(function)} compiled code that its forward found compiled: nothing tells "
        "whether the new graph saves what the old one did\n"
        "  received: a compilation inside of a replay, as after torch._dynamo.reset(), or where a guard fails there\n"
        '  works:    the step again, from its forward; or checkpoint(function, x, determinism_check="values")'
    )


def keeps_differently(function: Function, number: int, forward: str, replay: str) -> RecomputationError:
    """The error for call ``number`` (from 0) of ``keep``; ``forward`` and ``replay`` describe what each keeps."""
    return RecomputationError(
        f"the replay of region {name_of(function)} did not call torchckpt.keep as its forward did\n"
        f"  first to differ: call {number + 1} of keep\n"
        f"  forward kept:    {forward}\n"
        f"  replay keeps:    {replay}\n{_CAUSES}"
    )
