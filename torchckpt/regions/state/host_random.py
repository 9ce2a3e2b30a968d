"""Host random: generators of Python and of NumPy, from which a region may draw as from torch's."""
from __future__ import annotations

import pickle
import random
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

from torchckpt.modules import imported
from torchckpt.regions.state.ambient import Generator

__all__ = ["HostGenerator", "as_generator", "generators_in", "is_of_process"]


class HostGenerator:
    """A generator of Python or NumPy, by the methods of a :class:`torch.Generator`. Two of one source are equal."""

    __slots__ = ("_source",)

    def __init__(self, source: Any) -> None:
        self._source = source

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostGenerator) and other._source is self._source

    def __hash__(self) -> int:
        return id(self._source)

    def get_state(self) -> Any:
        """The state; two are equal where the next numbers are."""
        if isinstance(self._source, random.Random):
            return self._source.getstate()
        is_old = hasattr(self._source, "get_state")
        return pickle.dumps(self._source.get_state(legacy=False) if is_old else self._source.bit_generator.state)

    def set_state(self, state: Any, /) -> None:
        if isinstance(self._source, random.Random):
            self._source.setstate(state)
        elif hasattr(self._source, "set_state"):
            self._source.set_state(pickle.loads(state))
        else:
            self._source.bit_generator.state = pickle.loads(state)


def as_generator(value: Any) -> Generator | None:
    """``value``, if it is a generator of torch, of Python or of NumPy. A proxy is not asked: it may answer anything."""
    if issubclass(type(value), torch.Generator):
        generator: Generator = value
        return generator
    return HostGenerator(value) if _is_of_host(type(value)) else None  # type: ignore[arg-type]


def is_of_process(replayed: tuple[Generator, object]) -> bool:
    """Whether threads of several devices draw from the generator that is ``replayed``."""
    return replayed[0] is torch.default_generator or type(replayed[0]) is HostGenerator


def generators_in(values: Iterable[object]) -> list[Generator]:
    """The generators among ``values``."""
    return [generator for value in values if (generator := as_generator(value)) is not None]


@lru_cache(maxsize=1024)
def _is_of_host(kind: type[Any]) -> bool:
    if issubclass(kind, random.Random):
        return not issubclass(kind, random.SystemRandom)  # which has no state
    return issubclass(kind, imported("numpy.random", "Generator", "RandomState"))
