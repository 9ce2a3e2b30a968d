"""Free variables: the globals, closure variables and object fields that a forward reads outside of its modules.

The bytecode is searched once, and not run, for the names that it loads as globals and as attributes. Their values are
read at each call. A name that the code may read counts as read, so a call may be traced anew without need.
"""
from __future__ import annotations

import dis
import functools
import operator
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchckpt.graph.trace.guard import MOST_PARTS, Itself, constant_of, is_container, parts_of
from torchckpt.modules import OF_EVERY_MODULE

__all__ = ["FreeVariables"]

_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "torchckpt", "numpy"})
_CONTAINERS = (list, tuple, Mapping)
_DEPTH = 3
_BY_SYNTAX = frozenset({"forward", "backward", "__init__", "__call__", "__getitem__", "__getattr__", "__iter__"})
"""Methods that Python or torch calls, although the code does not load their names."""
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_ABSENT = object()


class _Variable(NamedTuple):
    """One name that the code reads: its label in a warning, and a function that reads its present value."""

    label: str
    read: Callable[[], Any]


class FreeVariables:
    """The values outside of ``model`` that its forward may read."""

    def __init__(self, model: nn.Module) -> None:
        self._places = _Search(model).places
        self._values: list[Any] = [_ABSENT] * len(self._places)
        self._parts: dict[int, list[Any]] = {}  # by place, the parts of a container when it was last read
        self._now: list[tuple[str, Hashable]] = [(label, None) for label, _ in self._places]

    def now(self) -> tuple[tuple[str, Hashable], ...]:
        """The present value of each place: a constant by value, any other object by identity."""
        values = [read() for _, read in self._places]
        for place, (new, old) in enumerate(zip(values, self._values)):
            if new is not old or (place in self._parts and _is_changed(self._parts[place], _parts_of(new))):
                self._look(place, new)
        self._values = values
        return tuple(self._now)

    def _look(self, place: int, value: Any) -> None:
        self._now[place] = self._now[place][0], _seen(value)
        self._parts.pop(place, None)
        if _is_container(value):
            self._parts[place] = _parts_of(value)


def _is_container(value: Any) -> bool:
    """Whether to look at the parts of ``value``, by its class: ``isinstance`` may run a slow ``__class__``."""
    return issubclass(type(value), _CONTAINERS) and is_container(type(value))


def _parts_of(value: Any) -> list[Any]:
    """The parts of a container, and those of lists and dicts inside it."""
    parts = [*value, *value.values()] if issubclass(type(value), Mapping) else list(value)
    return parts + [inner for part in parts if type(part) in (list, dict) for inner in _parts_of(part)]


def _is_changed(before: list[Any], now: list[Any]) -> bool:
    return len(before) != len(now) or not all(map(operator.is_, before, now))


def _seen(value: Any, depth: int = 0) -> Hashable:
    if not _is_container(value):
        return constant_of(value) or Itself(value)
    if len(value) > MOST_PARTS or depth >= _DEPTH:
        return Itself(value)
    parts = [part for pair in value.items() for part in pair] if isinstance(value, Mapping) else value
    return type(value), tuple(_seen(part, depth + 1) for part in parts)


def _size(value: Any, depth: int = 0) -> int:
    """The number of parts of ``value``, down to a limited depth."""
    if not _is_container(value) or depth >= _DEPTH:
        return 1
    return sum(_size(part, depth + 1) for part in parts_of(value)) if len(value) <= MOST_PARTS else len(value)


class _Search:
    """A search, from the classes of a model's modules, for all code that their forwards may run and read."""

    def __init__(self, model: nn.Module) -> None:
        self.places: list[_Variable] = []
        self._attributes = set[str]()
        self._owners: dict[int, Any] = {}  # every function, class and object, once
        self._searched: set[tuple[int, str]] = set()
        self._modules = {id(module) for module in model.modules()}
        for module in model.modules():
            self._add(module, type(module).__name__)
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                self._add(list(hooks.values()), "hook")
        self._search()

    def _add(self, value: Any, name: str) -> None:
        """Search ``value`` too, which the code calls ``name``, unless it belongs to a library."""
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._add(part, name)
        elif isinstance(value, types.MethodType):
            self._add(value.__func__, name)
            self._add(value.__self__, name)
        elif isinstance(value, (staticmethod, classmethod)):
            self._add(value.__func__, name)
        elif isinstance(value, property):
            self._add(value.fget, name)
        elif _is_container(value) and len(value) <= MOST_PARTS:
            for part in parts_of(value):
                self._add(part, name)
        elif id(value) not in self._owners and _is_users(value):
            self._owners[id(value)] = value
            if isinstance(value, types.FunctionType):
                self._read(value)
            elif not isinstance(value, (type, types.ModuleType)):
                self._add(type(value), type(value).__name__)

    def _read(self, function: types.FunctionType) -> None:
        names = function.__globals__
        for code in _codes(function.__code__):
            for instruction in dis.get_instructions(code):
                name = str(instruction.argval)
                if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and name in names:
                    self._place(names, name, name, functools.partial(names.get, name, _ABSENT))
                elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                    self._attributes.add(name)
                elif instruction.opname == "LOAD_CONST" and isinstance(instruction.argval, str):
                    self._attributes.update({name} if "getattr" in code.co_names else ())
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            self._place(cell, name, f"{name} in {function.__name__}", functools.partial(_contents, cell))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._add(value, function.__name__)

    def _search(self) -> None:
        """Look up every loaded attribute in every class and object so far, until a round finds nothing new."""
        before = None
        while before != (now := (len(self._searched), len(self._attributes), len(self._owners))):
            before = now
            for owner in list(self._owners.values()):
                if not isinstance(owner, types.FunctionType):
                    self._search_in(owner)

    def _search_in(self, owner: Any) -> None:
        slots = _slots_of(owner)
        attributes = {**getattr(owner, "__dict__", {}), **slots}
        label = getattr(owner, "__name__", type(owner).__name__)
        is_model = isinstance(owner, type) and issubclass(owner, nn.Module)  # the forward makes no modules
        by_syntax = _BY_SYNTAX - {"__init__"} if is_model else _BY_SYNTAX
        for name in sorted(self._attributes.union(by_syntax).intersection(attributes)):
            if id(owner) in self._modules and (name in OF_EVERY_MODULE or constant_of(attributes[name]) is not None):
                self._add(attributes[name], name)  # the guard has the attributes of modules already
            else:
                read = functools.partial(getattr, owner) if name in slots else vars(owner).get
                self._place(owner, name, f"{label}.{name}", functools.partial(read, name, _ABSENT))
        if isinstance(owner, type):
            for base in owner.__mro__[1:]:
                self._add(base, base.__name__)

    def _place(self, owner: Any, name: str, label: str, read: Callable[[], Any]) -> None:
        if (id(owner), name) not in self._searched:
            self._searched.add((id(owner), name))
            value = read()
            self._add(value, name)
            if _is_data(value, name, not isinstance(owner, types.CellType)):
                self.places.append(_Variable(label, read))


def _is_data(value: Any, name: str, is_global: bool) -> bool:
    """Whether ``value`` is data, so that ``name`` may be bound to another value later. A function or class under its
    own name is code, and so is a function that a decorator closes over."""
    if isinstance(value, (type, types.ModuleType, Tensor, staticmethod, classmethod, property)):
        return False
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, functools.partial)):
        return is_global and getattr(value, "__name__", "") != name
    if _is_container(value):  # a registry of functions is code; a large container is not a setting
        return _size(value) <= MOST_PARTS and not (value and all(isinstance(part, _CODE) for part in parts_of(value)))
    return constant_of(value) is not None or _is_users(value)


def _slots_of(value: Any) -> dict[str, Any]:
    """The values that an object has in ``__slots__`` of its classes, and not in its dictionary."""
    if isinstance(value, (type, types.ModuleType)):
        return {}
    named = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = [name for slots in named for name in ((slots,) if isinstance(slots, str) else slots)]
    return {name: getattr(value, name) for name in names if not name.startswith("__") and hasattr(value, name)}


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty
        return _ABSENT


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """``code``, and the code of functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_users(value: Any) -> bool:
    """Whether ``value`` is the user's: it has attributes, and does not come from a library."""
    if isinstance(value, (types.FunctionType, type)):
        home = value.__module__
    elif isinstance(value, types.ModuleType):
        home = value.__name__
    else:
        home = type(value).__module__ if not isinstance(value, nn.Module) else ""
    if isinstance(value, types.SimpleNamespace) or type(value).__name__ == "Namespace":  # of argparse
        return True
    if isinstance(value, Tensor) or str(home).partition(".")[0] in _LIBRARIES:
        return False
    return hasattr(value, "__dict__") or bool(_slots_of(value))
