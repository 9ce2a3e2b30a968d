"""Operations: raises at the n-th operator of a step, and knows what there should be afterwards."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from torchckpt import is_recomputing

__all__ = ["ERRORS", "Faulty", "Operations", "random_state"]

ERRORS = (KeyboardInterrupt, MemoryError, torch.OutOfMemoryError, RuntimeError)


def random_state() -> bytes:
    return bytes(torch.default_generator.get_state().numpy())


class Operations(TorchDispatchMode):
    """Lists the operators of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.random: list[bytes] = []
        """By operator, the state of the generator before it, as it is outside of replays."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = is_recomputing() and bool(self.random)
        self.random.append(self.random[-1] if inside else random_state())
        self.names.append(f"{func}{' in a replay' if inside else ''}")
        return func(*args, **(kwargs or {}))


class Faulty(TorchDispatchMode):
    """Raises ``error`` in place of an operator, the one with this ``number``, from 0."""

    def __init__(self, number: int, error: type[BaseException]) -> None:
        super().__init__()
        self._number, self._error, self._count = number, error, -1
        self._made: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._count += 1
        if self._count == self._number:
            raise self._error(f"at operator {self._number}, {func}")
        result = func(*args, **(kwargs or {}))
        self._made.update(_storages(_flat((result,))))
        self._made.difference_update(_storages(_flat(args)))  # what was there before, and what the caller has
        return result

    def alive(self, owned: Iterable[Tensor]) -> int:
        """How many storages that operators made are alive, without those of ``owned``."""
        return sum(not storage.expired() for storage in self._made.difference(_storages(owned)))


def _flat(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _flat(value)


def _storages(tensors: Iterable[Tensor]) -> Iterator[StorageWeakRef]:
    return (StorageWeakRef(one.untyped_storage()) for one in tensors if one.layout is torch.strided)
