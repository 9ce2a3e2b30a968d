"""Host random: generators of Python and of NumPy, from which a region may draw as from torch's."""
from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from functools import lru_cache
from types import BuiltinFunctionType, MethodType
from typing import Any

import torch

from torchckpt.modules import imported
from torchckpt.regions.state.ambient import Generator

__all__ = ["HostGenerator", "as_generator", "generators_in", "is_of_process", "kinds_of_host"]


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
        """The state; two are equal where the next numbers are. None, if there is none, as of a ``SystemRandom``."""
        source = self._source
        if isinstance(source, random.Random):
            try:
                return source.getstate()
            except NotImplementedError:
                return None
        return _comparable(source.get_state(legacy=False) if hasattr(source, "get_state") else _bits(source).state)

    def set_state(self, state: Any, /) -> None:
        source = self._source
        if isinstance(source, random.Random):
            if state is not None:
                source.setstate(state)
        elif hasattr(source, "set_state"):
            source.set_state(state)
        else:
            _bits(source).state = state


def _bits(source: Any) -> Any:
    return getattr(source, "bit_generator", source)


def _comparable(state: Any) -> Any:
    """A state of NumPy, with lists in place of arrays, which are not compared as a whole."""
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def as_generator(value: Any) -> Generator | None:
    """``value``, or what it is a method of, if that is a generator of torch, of Python or of NumPy. A proxy is not
    asked: it may answer anything."""
    if type(value) in (BuiltinFunctionType, MethodType):
        value = value.__self__
    if issubclass(type(value), torch.Generator):
        generator: Generator = value
        return generator
    return HostGenerator(value) if issubclass(type(value), kinds_of_host()) else None


def is_of_process(replayed: tuple[Generator, object]) -> bool:
    """Whether threads of several devices draw from the generator that is ``replayed``."""
    return replayed[0] is torch.default_generator or type(replayed[0]) is HostGenerator


def generators_in(values: Iterable[object]) -> list[Generator]:
    """The generators among ``values``."""
    return [generator for value in values if (generator := as_generator(value)) is not None]


def kinds_of_host() -> tuple[type[Any], ...]:
    """The classes of generators of Python and of NumPy, if it was imported."""
    return _kinds(sys.modules.get("numpy.random"))


@lru_cache(maxsize=1)
def _kinds(_: object) -> tuple[type[Any], ...]:
    return random.Random, *imported("numpy.random", "Generator", "RandomState", "BitGenerator")
