"""Settings: numbers and words that are attributes of modules, and their modes. A replay finds them as its forward did.

A loop may change them between a forward and its backward: a task, a factor, an adapter. What a forward changes itself
stays, as what a function counts.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dis import get_instructions
from itertools import chain, starmap
from operator import is_
from types import CodeType
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchckpt.modules import OF_EVERY_MODULE, is_of_torch, names_in
from torchckpt.regions.state.walk import Walk
from torchckpt.tensors import ATOMS, MUTABLE, PLAIN, is_of_tensors, noted

__all__ = ["Key", "Settings"]

Key: TypeAlias = tuple[int, str]
"""A buffer: the index of its module in the layout, and its name in that module. An attribute: the index is higher by
the number of modules."""

_OF_EVERY_MODULE = OF_EVERY_MODULE | {"training"}
_SETTERS = frozenset({"setattr", "vars", "__dict__", "__setattr__"})
_SYNC = "require_forward_param_sync"
"""Whether the next forward of a DistributedDataParallel sends buffers. A replay sends what its forward has sent."""
_GET: Callable[[dict[str, Any], str], Any] = dict.get


class Settings:
    """The settings of ``modules`` that there are now: where they are.

    Args:
        asking: the places of the modules whose code asks ``is_recomputing()``: what it sets is as it wants it.
        flattened: where the attributes of modules are on which FSDP1 sets weights.
    """

    def __init__(self, modules: Sequence[nn.Module], asking: Set[int], flattened: Set[int]) -> None:
        self._dicts = [vars(module) for module in modules]
        self._names = [frozenset(attributes) for attributes in self._dicts]
        self._asking, self._flattened = {id(self._dicts[place]) for place in asking}, flattened
        self._tables = [(vars(module), module._parameters, module._buffers) for module in modules]
        named = enumerate(map(_names_in, modules))
        numbers = [(place, name) for place, names in named for name in names]
        self._keys: list[Key] = [(place + len(modules), name) for place, name in numbers]
        self._replicas = [vars(module) for module in modules if isinstance(module, DistributedDataParallel)]
        self._places = [(attributes, "training") for attributes in self._dicts]
        self._places += [(self._dicts[place], name) for place, name in numbers]
        self._places += [(attributes, _SYNC) for attributes in self._replicas]
        kinds = map(type, starmap(_GET, self._places))
        self._mutable = [index for index, kind in enumerate(kinds) if kind in MUTABLE]

    @property
    def has_tables(self) -> bool:
        """Whether a module has a list, a dictionary or a set."""
        return bool(self._mutable)

    def now(self) -> tuple[list[Any], list[Key]]:
        """The settings, the modes first, and the keys of those that are tensors now. Types stand for tensors and for
        what may hold some: calls that hold what the last one has left on a module would hold the graphs of all before.
        """
        values, tensors = list(starmap(_GET, self._places)), list[Key]()
        if not ATOMS.issuperset(map(type, values)):
            for index in [index for index, kind in enumerate(map(type, values)) if kind not in ATOMS]:
                if isinstance(values[index], Tensor):
                    tensors.append(self._keys[index - len(self._dicts)])
                values[index] = noted(values[index])
        return values, tensors

    def stay(self, then: Sequence[Any]) -> list[bool]:
        """Which of the settings ``then`` are still the same."""
        stay = list(map(is_, starmap(_GET, self._places), then))
        for index in self._mutable:
            stay[index] = noted(_GET(*self._places[index])) == then[index]
        return stay

    def others(
        self, then: Sequence[Any], stay: Sequence[bool], now: Sequence[Any], lent: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """The attributes to put back so that ``now()`` is as ``then``, before a forward in which some ``stay``. A
        number that it has changed to another number stays: functions count; but not where a replay is ``lent`` tensors
        of the module, or any if none asks, as a cache with its length. Who asks ``is_recomputing()`` sees to it.
        """
        lent_tables, all_go = {*map(id, lent)}, bool(lent) and not self._asking
        are_lent = (of for of in self._tables if all_go or not lent_tables.isdisjoint(map(id, of)))
        with_numbers = {id(of[0]) for of in are_lent}
        for (attributes, name), value, stays, now_is in zip(self._places, then, stay, now):
            goes = (stays or id(attributes) in with_numbers) and id(attributes) not in self._asking
            goes = goes or name == "training" or (isinstance(now_is, type) and issubclass(now_is, Tensor))
            goes = goes or is_of_tensors(value) or is_of_tensors(now_is)
            is_table = type(value) in MUTABLE  # a copy, and not to be changed by a replay
            differs = now_is is not value and not (isinstance(value, type) or (is_table and now_is == value))
            goes = differs and goes and (name == "training" or not _is_set_in(_asking_hooks(attributes), name))
            if goes or name == _SYNC:  # a replay sets that one, too
                yield attributes, name, value.copy() if is_table else value
        for attributes in self._replicas:
            yield attributes, "require_backward_grad_sync", False  # a forward with it prepares a reduction

    def added(self, known: Sequence[Key], own: Set[Key]) -> Iterator[Key]:
        """The attributes added since: tensors that are not ``known``, nor weights that FSDP1 sets, and numbers and
        words where the module's code asks no ``is_recomputing()``. The forward's ``own`` numbers stay, with what tells
        of them, if it adds no tensors."""
        for place, (attributes, names) in enumerate(zip(self._dicts, self._names), start=len(self._dicts)):
            tensors = [
                (place, name)
                for name, value in attributes.items()
                if isinstance(value, Tensor) or (name not in names and is_of_tensors(value))
            ]
            added = [key for key in tensors if key not in known and place not in self._flattened]
            yield from added
            new = [] if id(attributes) in self._asking else [name for name in attributes if name not in names]
            stay = own if own.isdisjoint(added) else ()
            keys = [(place, name) for name in new if not isinstance(noted(attributes[name]), type)]
            codes = _asking_hooks(attributes) if keys else []
            yield from (key for key in keys if not (key in stay or _is_set_in(codes, key[1])))


def _names_in(module: nn.Module) -> list[str]:
    if is_of_torch(module):
        return []
    values = ((name, value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE)
    return [name for name, value in values if isinstance(value, (*PLAIN, *MUTABLE, tuple, frozenset))]


def _asking_hooks(attributes: Mapping[str, Any]) -> list[CodeType]:
    """The code of the hooks of the module with these ``attributes``; none if it does not ask ``is_recomputing()``."""
    walk = Walk(*attributes["_forward_hooks"].values(), *attributes["_forward_pre_hooks"].values())
    codes = [function.__code__ for function in walk.functions]
    return codes if any("is_recomputing" in names_in(code) for code in codes) else []


def _is_set_in(codes: Iterable[CodeType], name: str) -> bool:
    is_in_word = any(name in code.co_consts and not _SETTERS.isdisjoint(code.co_names) for code in codes)
    steps = chain.from_iterable(get_instructions(code) for code in codes if name in code.co_names)
    return is_in_word or any(step.opname == "STORE_ATTR" and step.argval == name for step in steps)
