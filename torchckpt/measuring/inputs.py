"""Inputs: what calls are called with, and what of it a call does not need if it is kept."""
from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from typing import Any

from torch import Tensor

from torchckpt.regions.private import alive, use_count
from torchckpt.regions.saved import storage_of

__all__ = ["Inputs"]


class Inputs:
    """The inputs of the calls of a forward, which come one after the other and are recomputed.

    The boundary of a call holds its inputs. If the call is kept instead, an input is freed that nobody else holds and
    that no call saves, as one in half precision of which a norm saves a copy in float32.
    """

    def __init__(self) -> None:
        self.claimed: set[Any] = set()
        """The storages of all inputs."""
        self._new: dict[int, list[tuple[weakref.ref[Tensor], dict[Any, int]]]] = {}
        """By call, those that it was the first to be called with, and their storages with their bytes."""
        self._freed: dict[int, dict[Any, int]] = {}
        """By call, the storages of inputs that its boundary alone held when the next call began."""

    def begin(self, call: int, tensors: Iterable[Tensor]) -> int:
        """Note that ``call``, a number, begins with ``tensors``. Returns the bytes that no call before it had."""
        self._freed[call - 1] = self._alone(call - 1)
        sizes = {tensor: storage_of(tensor) for tensor in tensors}
        new = {key: size for each in sizes.values() for key, size in each.items() if key not in self.claimed}
        self._new[call] = [(weakref.ref(tensor), each) for tensor, each in sizes.items() if each.keys() <= new.keys()]
        self.claimed.update(new)
        return sum(new.values())

    def unsaved_bytes(self, call: int, saved: Container[Any]) -> int:
        """The bytes of inputs that are freed if ``call`` is kept, where calls have ``saved`` these storages."""
        return sum(size for key, size in self._freed.get(call, {}).items() if key not in saved)

    def freed_bytes(self, call: int, own: Container[Any], saved: Container[Any]) -> int:
        """The bytes of inputs that go with the boundary of ``call``, which has saved its ``own`` storages, and that
        other calls hold beyond that if they are kept, as they have ``saved`` these."""
        return sum(size for key, size in self._alone(call).items() if key in saved and key not in own)

    def _alone(self, call: int) -> dict[Any, int]:
        """The storages of inputs that the boundary of ``call`` alone holds now."""
        dead = [item for tensor, sizes in self._new.get(call, []) if alive(tensor) is None for item in sizes.items()]
        return {key: size for key, size in dead if use_count(key) == 1}
