"""Module state: a replay finds the parameters and buffers of the forward on its modules, which are restored after it.

Before a replay, the parameters and buffers of the region's modules (``layout.py`` says which) are compared with those
of the forward. Where they differ, the module holds a substitute while the replay runs. For a parameter that was
replaced, as by ``functional_call``, it is the parameter of the forward. For a buffer that changed, in the forward
itself (``spectral_norm``, an observer) or after it, and for a parameter that forwards change in place (an embedding
with ``max_norm``), it is a copy of its old values. Reading a tensor that was changed in place and has no substitute is
an error, as in eager autograd.

A buffer is copied when a forward first sees it, and again after it has changed. All calls share the copy until then, so
a buffer that never changes is copied once. A large copy of such a buffer is not kept. A parameter is copied from the
second forward on that changes it; an embedding's with ``max_norm`` from the first.
"""
from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from torchckpt.errors import RecomputationError
from torchckpt.modules import imported, module_of, name_of, uncompiled
from torchckpt.regions.flags import state_lock
from torchckpt.regions.private import alive, set_version, storage_key
from torchckpt.regions.state.layout import Copy, Layout, layout_of, lengths_of, values_of
from torchckpt.regions.state.reached import runs_compiled_code
from torchckpt.regions.state.settings import Key
from torchckpt.regions.state.substitutes import (
    NOTHING,
    Late,
    Substitutes,
    changed_in_place,
    changed_late,
    lock_state,
    put,
)
from torchckpt.tensors import graded_as, may_equal, parameter_as, version_of
from torchckpt.typing import Function

__all__ = ["ModuleState", "record_state"]

_SMALL_BYTES = 2**12
"""Up to this size the copy of a buffer is kept although no forward has changed it."""
_MOST_BYTES = 2**28
"""The most bytes of buffers that one call copies of modules that are not the function's own, such as weights of a
quantized model. Others are copied once a forward has changed them."""

_twins: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The substitutes for buffers."""

_EMPTY: dict[Any, Any] = {}


class ModuleState:
    """The parameters, buffers and modes that one forward found on its modules. ``is_reached``: some of these are not
    the function's own, and it may never call them; ``is_plain``: nor is it a compiled method of one."""

    def __init__(self, layout: Layout, values: list[Any], is_locked: bool, is_reached: bool, is_plain: bool) -> None:
        self.layout, self._values, self._is_locked, self._is_reached = layout, values, is_locked, is_reached
        self._names, self._versions = layout.names(), _versions(values, len(layout.children))
        self._flags = layout.flags()
        self._stay: list[bool] = []
        """Which of ``_flags`` the forward has left as they were."""
        self._own: Set[Key] = frozenset()  # the attributes that the forward has added
        self._may_set = layout.may_set or is_plain
        self._found: tuple[list[Any], list[Any]] = [], []  # what a replay has found on the modules, if it may set them
        self._after: dict[Key, int] = _EMPTY
        """The versions of the parameters that this forward has changed in place, after it."""
        self._new_copies: list[Key] = []  # the copies that this call made
        self._copied_bytes = 0
        self._parameters: dict[Key, Copy] = _EMPTY
        """The parameters that forwards are known to change, as they are before this one."""
        if layout.changing_parameters:
            parameters = layout.parameters_of(values, self._names) or {}
            changing = [(key, parameters.get(key)) for key in layout.changing_parameters]
            self._parameters = {key: self._copy(key, p) for key, p in changing if p is not None and not _is_sharded(p)}
        self._buffers: dict[Key, tuple[Tensor | None, Copy | None]] = {}
        self._left_out: set[Key] = set()
        self._non_leaves: dict[Key, weakref.ref[Tensor]] = {}
        """Buffers that are not leaves. ``_buffers`` has a detached alias of each."""
        if not layout.is_simple or len(values) > layout.without_buffers:
            for key, tensor in layout.buffers():
                if is_plain and layout.asks(key):  # it may be updated under a guard, and then used
                    self._left_out.add(key)
                elif tensor is not None and tensor.grad_fn is not None:  # the tensor would keep its graph alive
                    self._buffers[key] = tensor.detach().requires_grad_(), None
                    self._non_leaves[key] = weakref.ref(tensor)
                else:
                    self._buffers[key] = tensor, None if tensor is None else self._copy(key, tensor)

    def _copy(self, key: Key, tensor: Tensor) -> Copy:
        copy, table = self.layout.copies.get(key), self.layout.statistics.get(key)
        if tensor.is_inference():
            self.layout.unversioned.add(key)
        if copy is None or not copy.is_of(tensor, table) or key in self.layout.unversioned:
            copy = self.layout.copies[key] = Copy(tensor, table, self._has_room(key, tensor))
            self._new_copies.append(key)
        return copy

    def _has_room(self, key: Key, tensor: Tensor) -> bool:
        """Whether this call copies ``tensor``."""
        is_large = tensor.layout == torch.strided and tensor.nbytes > _SMALL_BYTES
        if not (self._is_reached and is_large) or key in self.layout.changing:
            return True
        self._copied_bytes += tensor.nbytes
        return self._copied_bytes <= _MOST_BYTES

    def tensors(self) -> list[Tensor]:
        """What a replay may read, and maybe nothing else holds; not if sharded or sparse: the memory is not theirs."""
        tensors = chain.from_iterable((tensor, copy and copy.values) for tensor, copy in self._buffers.values())
        return [tensor for tensor in tensors if type(tensor) is Tensor and tensor.layout == torch.strided]

    def statistics(self) -> set[int]:
        """By ``id``: the tables of norm layers whose statistics the forward found. A replay has them as they were."""
        return {id(self.layout.statistics.get(key)) for key in self._buffers}

    def note_changes(self, has_ended: bool = True) -> None:
        """Note what the forward has changed so far; at its end, drop large copies of other buffers."""
        layout, self._stay = self.layout, self.layout.settings.stay(self._flags)
        self._own = {*layout.added_attributes()}
        versions = _versions(self._values, len(layout.children))
        if versions != self._versions and not self._is_reached:
            each = zip((layout.parameters_of(self._values, self._names) or {}).items(), self._versions, versions)
            self._after = {key: now for (key, p), then, now in each if then != now and not _is_sharded(p)}
            layout.changing_parameters |= self._after.keys()
            layout.changing |= self._after.keys()
        if self._is_reached and values_of(layout.tables[: len(layout.dicts) + 1]) != layout.children:
            self._is_reached = False  # it makes modules itself
        changing = {key for key in self._buffers if not self._is_unchanged(key)}
        if changing and not self._is_locked:
            self._put_back(changing)
        layout.rearranged |= self._may_set and not self._is_as_before()
        layout.changing |= changing
        for key in self._new_copies:
            tensor, copy = self._buffers.get(key, (None, None))
            if tensor is None or copy is None or key in layout.changing or key in layout.unversioned:
                continue
            drops = tensor.layout != torch.strided or (tensor.nbytes > _SMALL_BYTES and key not in layout.statistics)
            if not may_equal(copy.values, tensor):
                layout.changing.add(key)
                layout.unversioned.add(key)
            elif has_ended and drops:
                copy.values = None

    def _is_as_before(self) -> bool:
        """Whether modules have the modes, children, parameters and buffers that this forward has found, by the same
        names, and parameters require grad as then."""
        layout = self.layout
        now, flags = values_of(layout.tables), layout.graded()
        pairs = zip(now, self._values)
        return (
            all(self._stay[: len(layout.dicts)])
            and flags == self._flags[len(self._flags) - len(flags) :]
            and len(now) == len(self._values)
            and layout.names() == self._names
            and all(one is other or _is_sharded(one) or _is_sharded(other) for one, other in pairs)
        )

    def _put_back(self, keys: set[Key]) -> None:
        """Put the buffers back where this forward has set what it found, and that was a replay's of another thread."""
        with state_lock:
            for key in keys:
                values, name = self.layout.dict_of(key), key[1]
                if values.get(name) in _twins:
                    values[name] = self._buffers[key][0]

    def _is_unchanged(self, key: Key) -> bool:
        """Whether the buffer on the module is the one that the forward found, with the same values."""
        tensor, copy = self._buffers[key]
        original = alive(self._non_leaves[key]) if key in self._non_leaves else tensor
        if self.layout.dict_of(key).get(key[1], NOTHING) is not original:
            return False
        if tensor is None or copy is None:
            return True
        return copy.is_of(tensor, self.layout.statistics.get(key)) and key not in self.layout.unversioned

    def noting(self, function: Function) -> Function:
        """``function`` for a replay, which first notes what it finds on the modules, if it may set them."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._found = self.layout.held(self._own), self.layout.flags()
            return function(*args, **kwargs)

        return run if self._may_set else function

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """At the end of the block, a replay of a forward that rearranges its modules, these are as before."""
        tables = [(table, table.copy()) for table in self.layout.tables]
        modes = [(attributes, "training", attributes["training"]) for attributes in self.layout.dicts]
        graded = [(p, p.requires_grad) for table in self.layout.parameters for p in table.values() if p is not None]
        try:
            with graded_as(graded):
                yield
        finally:
            put(modes)
            for table, then in tables:
                if not any(map(_is_sharded, chain(table.values(), then.values()))):
                    table.clear()
                    table.update(then)

    def is_as_found(self) -> bool:
        """Whether modules hold what the replay has found, but for settings that its forward has left otherwise, as what
        it counts: it may stop here. Else its rest may put that back."""
        if not self._may_set:
            return True
        (then, flags), now = self._found, self.layout.held(self._own)
        stay = chain(self._stay, repeat(True))
        return (
            len(now) == len(then)
            and all(a is b or _is_sharded(a) or _is_sharded(b) for a, b in zip(now, then))
            and all(a is b or not stays or a == b for a, b, stays in zip(self.layout.flags(), flags, stay))
        )

    def substitutes(self, function: Function) -> Substitutes | None:
        """The substitutes for a replay of ``function``; None if all is as the forward found it."""
        layout, then = self.layout, self._values
        now, first = values_of(layout.tables), len(layout.children)
        same = len(now) == len(then) and all(map(operator.is_, now, then)) and _versions(now, first) == self._versions
        flags = layout.flags()
        same = same and all(map(operator.is_, flags, self._flags)) and layout.lengths == lengths_of(layout.dicts)
        same = same and self._names == layout.names()
        if same and layout.is_simple and not (layout.unversioned or layout.changing or self._own):
            return None
        if now[:first] != layout.children and not self._is_reached and layout.has_other_children():
            raise _other_modules(function, "modules")
        substitutes = Substitutes([], {}, {}, [], layout)
        if not same:
            self._substitute_parameters(substitutes, function)
        self._substitute_buffers(substitutes)
        gone = {key for key in self._own if key[1] not in layout.dict_of(key)}  # the replay adds them again
        lent = [of for of, name, twin in substitutes.values if twin is not NOTHING or isinstance(of.get(name), Tensor)]
        own = self._own if layout.has_asking or not lent else frozenset()  # numbers go with tensors
        added = dict.fromkeys((*layout.added_attributes(own), *gone))
        lent += [of for key in added if isinstance((of := layout.dict_of(key)).get(key[1]), Tensor)]
        substitutes.values.extend((layout.dict_of(key), key[1], NOTHING) for key in added)
        substitutes.values.extend(layout.settings.others(self._flags, self._stay, flags, lent))
        if (substitutes.changed or substitutes.late) and (
            layout.is_compiled or (self._is_reached and runs_compiled_code(function))
        ):  # whose reads cannot be watched: it would be compiled again
            if self._is_reached:
                substitutes = substitutes._replace(changed={}, late={})
            for tensor in substitutes.changed.values():
                raise changed_in_place(function, tensor, layout.path_of(tensor))
            for late in substitutes.late.values():
                raise changed_late(function, late)
        return substitutes if any(substitutes[:-1]) else None

    def _substitute_parameters(self, substitutes: Substitutes, function: Function) -> None:
        then = self.layout.parameters_of(self._values, self._names)
        if then is None:
            raise _other_modules(function, "parameters")
        twins: dict[int, nn.Parameter] = {}
        for (key, tensor), version, graded in zip(then.items(), self._versions, self._flags[-len(then) :]):
            parameters, name = self.layout.parameters[key[0]], key[1]
            now, twin = parameters[name], tensor
            if _is_sharded(tensor) or _is_sharded(now):  # FSDP2 swaps them, and keeps their values right
                continue
            if tensor is not None and version_of(tensor) != version:
                if id(tensor) not in twins:
                    twins[id(tensor)] = self._twin(substitutes, key, tensor, version)
                twin = twins[id(tensor)]
            if now is not twin:
                substitutes.values.append((parameters, name, twin))
            if twin is not None and twin.requires_grad is not graded:
                substitutes.graded.append((twin, graded))

    def _twin(self, substitutes: Substitutes, key: Key, tensor: nn.Parameter, version: int) -> nn.Parameter:
        """The substitute for a parameter that was at ``version``, and has been changed in place since."""
        copy = self._parameters.get(key)
        if copy is None and self._after.get(key) != tensor._version:
            substitutes.changed[id(tensor)] = tensor
            return tensor
        values = tensor.detach().clone() if copy is None else copy.clone()
        twin: nn.Parameter = parameter_as(tensor, values)
        if copy is None:
            substitutes.late[id(twin)] = Late(tensor, self.layout.path_of(tensor))
        set_version(twin, version)
        return twin

    def _substitute_buffers(self, substitutes: Substitutes) -> None:
        twins: dict[int, Tensor] = {}  # one tensor stays one tensor
        memory: dict[int | None, int] = {}
        for key, (tensor, copy) in self._buffers.items():
            if self._is_unchanged(key):
                if key in self.layout.changing:  # what was None, and is again: the replay sets it
                    substitutes.values.append((self.layout.dict_of(key), key[1], self.layout.dict_of(key)[key[1]]))
                continue
            original = alive(self._non_leaves[key]) if key in self._non_leaves else None
            twin = tensor if original is None else original
            if tensor is not None and copy is not None:
                is_alone = memory.setdefault(storage_key(tensor), id(tensor)) == id(tensor)
                if copy.values is not None and not tensor.requires_grad and is_alone:
                    if id(tensor) not in twins:
                        twins[id(tensor)] = copy.clone()
                        _twins[twins[id(tensor)]] = None
                    twin = twins[id(tensor)]
                elif not copy.is_of(tensor, self.layout.statistics.get(key)):
                    substitutes.changed[id(tensor)] = tensor
            substitutes.values.append((self.layout.dict_of(key), key[1], twin))
        layout = self.layout
        known = self._buffers.keys() | self._left_out
        added = [key for key, _ in layout.buffers() if key not in known and key[0] not in layout.norms]
        substitutes.values.extend((layout.dict_of(key), key[1], NOTHING) for key in added)


def record_state(function: Function, args: Sequence[Any], is_reached: bool) -> tuple[ModuleState | None, bool]:
    """Record the modules of ``function`` and those among ``args`` before it is called.

    The bool says whether its calls are known to change buffers. If so, ``state_lock`` is held, and the caller
    releases it after the call."""
    layout_with_values = layout_of(function, args)
    if layout_with_values is None:
        return None, False
    layout, values = layout_with_values
    is_plain = is_reached and module_of(uncompiled(function)) is None
    if not layout.changing:
        return ModuleState(layout, values, False, is_reached, is_plain), False
    lock_state(function, "forward")
    try:
        return ModuleState(layout, values_of(layout.tables), True, is_reached, is_plain), True
    except BaseException:
        state_lock.release()
        raise


def _versions(values: Sequence[Any], first: int) -> list[int]:
    """The version counters of the tensors from ``first`` on."""
    try:
        return [0 if tensor is None else tensor._version for tensor in values[first:]]
    except RuntimeError:  # an inference tensor is among them
        return [version_of(value) if isinstance(value, Tensor) else 0 for value in values[first:]]


def _is_sharded(tensor: Tensor | None) -> bool:
    return isinstance(tensor, imported("torch.distributed.tensor", "DTensor"))


def _other_modules(function: Function, what: str) -> RecomputationError:
    return RecomputationError(
        f"the {what} of region {name_of(function)} are not those that its forward started with: some were added, "
        "removed or replaced since\n"
        "  works:    changes of modules after the backward; and a first call that creates some outside a region, under "
        "torch.no_grad()"
    )
