"""Saved: counts the bytes that autograd keeps from a forward for its backward."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.regions.private import keep_from_dynamo, look_through
from torchckpt.tensors import inner_tensors, version_of

__all__ = [
    "SavedBytes", "bytes_of", "has_no_graph", "held", "saved_bytes", "storage_of", "storages_of", "telling_of_saved",
    "unchanged",
]


class SavedBytes:
    """``total``: the bytes that autograd keeps from a forward for its backward."""

    def __init__(self) -> None:
        self._storages: dict[StorageWeakRef, int] = {}  # not by address: a freed address may be used again
        self._weights: set[StorageWeakRef] = set()
        """Those of parameters. A backward that makes a graph saves tensors that do not tell whose views they are."""

    def __repr__(self) -> str:
        return f"<SavedBytes: {self.total}>"

    @property
    def total(self) -> int:
        return sum(self._storages.values())

    def _note(self, tensor: Tensor) -> None:
        whole = tensor if tensor._base is None else tensor._base
        storages = storage_of(tensor)
        if isinstance(whole, nn.Parameter):
            self._weights |= storages.keys()
        self._storages.update({key: size for key, size in storages.items() if key not in self._weights})


def has_no_graph(tensor: Tensor) -> bool:
    """Whether no graph is behind ``tensor``, nor behind what it is a view of: one that the forward of an autograd
    Function makes of its input is a leaf."""
    return tensor.is_leaf and (tensor._base is None or tensor._base.is_leaf)


def held(tensor: Tensor) -> Tensor:
    """What autograd holds for ``tensor``, which it saves: no graph behind it."""
    return tensor if has_no_graph(tensor) else tensor.detach()


def unchanged(tensor: Tensor, version: int) -> Tensor:
    """``tensor``, which was saved at this version. Raises, as autograd does where there are no hooks, if it was changed
    in place since: torch looks at no version of what hooks have."""
    if version_of(tensor) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
            "instead\n  works:    the operation out of place, such as x = x + 1 instead of x.add_(1)"
        )
    return tensor


def telling_of_saved(note: Callable[[Tensor], object]) -> saved_tensors_hooks:
    """A context in which ``note`` gets each tensor that autograd saves in this thread."""

    def pack(tensor: Tensor) -> tuple[Tensor, int]:
        note(tensor)
        return held(tensor), version_of(tensor)

    look_through(pack)
    return saved_tensors_hooks(pack, lambda kept: unchanged(*kept))


keep_from_dynamo(telling_of_saved)


@contextmanager
def saved_bytes() -> Iterator[SavedBytes]:
    """Count the bytes of the storages that autograd saves in this thread until the end of the block.

    Each storage counts once, in full. Inputs count, even if the caller holds them too. Parameters and their views do
    not count, and sparse tensors do not. Of a region only its boundary counts, and what ``torchckpt.keep`` keeps, with
    its results. Tensors that a selective policy (``context_fn``) keeps are no saved tensors, and do not count.
    """
    saved = SavedBytes()
    with telling_of_saved(saved._note):
        yield saved


def bytes_of(tensors: Iterable[Tensor], but: Iterable[Tensor] = ()) -> int:
    """The bytes of the storages of ``tensors``, each counted once, without those of ``but``."""
    storages = storages_of(tensors)
    for storage in storages_of(but):
        storages.pop(storage, None)
    return sum(storages.values())


def storages_of(tensors: Iterable[Tensor]) -> dict[StorageWeakRef, int]:
    """The storages of ``tensors``, each once, and their bytes."""
    return {storage: size for tensor in tensors for storage, size in storage_of(tensor).items()}


def storage_of(tensor: Tensor) -> dict[StorageWeakRef, int]:
    """The storage of ``tensor`` and its bytes; empty for a sparse tensor, which has no storage. A tensor that wraps
    others, such as a DTensor, has theirs: what this rank holds."""
    if hasattr(tensor, "__tensor_flatten__"):
        return storages_of(inner_tensors(tensor))
    if tensor.layout != torch.strided:
        return {}
    storage = tensor.untyped_storage()
    return {StorageWeakRef(storage): storage.nbytes()}  # type: ignore[no-untyped-call]  # in torch
