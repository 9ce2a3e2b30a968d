"""Kept: the calls of ``keep`` in one forward of a region, and what each returned, drew and changed."""
from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence, MutableSet, Sequence
from copy import copy as shallow_copy
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchckpt.errors import Fault, RecomputationError, raise_fault
from torchckpt.modules import contents_of, name_of
from torchckpt.regions.core.difference import keeps_differently
from torchckpt.regions.devices import SyncPoint, accelerators_among
from torchckpt.regions.private import alive, apply_of, set_version
from torchckpt.regions.state.ambient import Generator, drawn_since, random_state, restore_states
from torchckpt.regions.state.boundary import Boundary
from torchckpt.regions.state.layout import Copy
from torchckpt.regions.state.module_state import ModuleState
from torchckpt.regions.state.norms import COUNTER
from torchckpt.tensors import copy_attributes, hides_tensors, tensors_of, version_of
from torchckpt.typing import Function

__all__ = ["Buffers", "Inputs", "KeptCall", "KeptCalls", "Result", "buffers_of", "changed_buffers", "inputs_of"]


class KeptCall(NamedTuple):
    """One call of ``keep`` in one forward."""

    name: str
    """The name of the function in errors."""
    place: int | None
    """How many tensors the region had saved before; None for a region of torch, which does not tell."""
    result: Any = None
    buffers: Any = ()

    def __str__(self) -> str:
        return self.name if self.place is None else f"{self.name}, after {self.place} saved tensors"


class KeptCalls:
    """The calls of ``keep`` in one forward of a frame, and how far its replay has come."""

    __slots__ = ("_calls", "_fault", "_fresh", "_taken")

    def __init__(self) -> None:
        self._calls: list[KeptCall] = []
        self._taken = 0
        self._fresh: Sequence[object] | None = None  # while a replay is under way
        self._fault: tuple[int, str, str] | None = None  # no exception, which would hold the replay's tensors

    def add(self, call: KeptCall) -> None:
        self._calls.append(call)

    def begin(self, fresh: Sequence[object] | None) -> None:
        """Note that a replay begins, which will save its tensors in ``fresh``.

        None: it has failed, or it is one of torch, whose tensors we do not see.
        """
        self._taken, self._fresh, self._fault = 0, fresh, None

    def next(self, region: Any, name: str, checked: bool) -> KeptCall:
        """The forward's call that the replay of ``region``, which now calls the function ``name``, has come to."""
        number, now = self._taken, KeptCall(name, None if self._fresh is None else len(self._fresh))
        then = self._calls[number] if number < len(self._calls) else None
        if self._fault is None and (then is None or (checked and then[:2] != now[:2])):
            self._fault = number, "nothing" if then is None else str(then), str(now)
        if self._fault is not None:
            raise keeps_differently(region, *self._fault)
        self._taken += 1
        return self._calls[number]

    def end(self, region: Function, checked: bool) -> None:
        """Note the end of the replay. Raises if a call is missing, or if ``region`` caught what :meth:`next` raised."""
        fresh, self._fresh = self._fresh or (), None
        if checked and self._fault is None and self._taken < len(self._calls):
            then = self._calls[self._taken]
            if then.place is not None and then.place < len(fresh):
                self._fault = self._taken, str(then), "nothing there"
        if self._fault is not None:
            raise keeps_differently(region, *self._fault)


# one call -----------------------------------------------------------------------------------------------------------


Inputs: TypeAlias = dict[tuple[str, int], Tensor]
"""The tensors that a call gets, by their places: those among its arguments, and those in the closure and the defaults
of its function. A replay of the call gets them, too."""


def inputs_of(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """The tensors that the call ``function(*args, **kwargs)`` gets."""
    arguments: list[Any] = [args, kwargs]
    while isinstance(function, partial):
        arguments.append((function.args, function.keywords))
        function = function.func
    inputs: Inputs = {("argument", place): tensor for place, tensor in enumerate(tensors_of(arguments)[0])}
    code = function.__func__ if isinstance(function, MethodType) else function
    contents = contents_of(code) if isinstance(code, FunctionType) else []
    inputs.update({("content", place): value for place, value in enumerate(contents) if isinstance(value, Tensor)})
    return inputs


_DATA = (MutableMapping, MutableSequence, MutableSet, SimpleNamespace)


class _InputPlace:
    """Stands for an output that is one of the inputs."""

    def __init__(self, place: tuple[str, int]) -> None:
        self.place = place


class Result:
    """What one call returned or raised, and what it changed.

    Make it before the call, and ``note()`` the call after it. ``replay()`` then returns the outputs, and leaves
    arguments and random numbers as the function left them. ``raise_error()`` raises what the function raised.
    """

    __slots__ = ("_changed", "_draws", "_error", "_outputs", "_random", "_spec", "_sync_point", "_versions")

    def __init__(self, inputs: Inputs, generators: Sequence[Generator]) -> None:
        self._versions = {place: version_of(tensor) for place, tensor in inputs.items()}
        self._random = random_state(dict.fromkeys(generators))

    def note(self, function: Function, outputs: Any, inputs: Inputs, error: Exception | None = None) -> None:
        """Note what ``function`` returned or raised, and what it changed since this was made."""
        self._error = None if error is None else _without_traceback(error)
        leaves, self._spec = pytree.tree_flatten(outputs)
        _check_outputs(function, leaves)
        places = {id(tensor): _InputPlace(place) for place, tensor in inputs.items()}
        copies = {id(leaf): _copied(leaf) for leaf in leaves}
        # The leaves are kept as the arguments of a region are.
        self._outputs = Boundary(tuple(places.get(id(leaf), copies[id(leaf)]) for leaf in leaves), {})
        self._outputs.drop_graphs()
        self._changed = [
            (place, weakref.ref(tensor), Copy(tensor), tensor.requires_grad)
            for place, tensor in inputs.items()
            if version_of(tensor) != self._versions[place]
        ]
        self._draws = [(generator, before, generator.get_state()) for generator, before in drawn_since(self._random)]
        self._random = []
        devices = accelerators_among((outputs, *inputs.values()), {})
        self._sync_point = SyncPoint(devices) if devices else None

    def replay(self, function: Function, inputs: Inputs, replays: Callable[[Generator, Any], bool]) -> Any:
        """Return the outputs. ``replays`` says of a generator, and its state before, whether the replay sets it."""
        leaves, _, tensors = self._outputs.arguments("a result of torchckpt.keep")
        needed = [place for place, *_ in self._changed]
        needed += [leaf.place for leaf in leaves if isinstance(leaf, _InputPlace)]
        arguments = [place for place in inputs if place[0] == "argument"]
        before = [place for place in self._versions if place[0] == "argument"]
        if arguments != before or not inputs.keys() >= set(needed):
            raise _other_arguments(function)
        self.wait_before_using([*tensors, *(copy.values for _, _, copy, _ in self._changed)])
        for place, original, copy, requires_grad in self._changed:
            if alive(original) is not inputs[place]:
                _write(function, copy.clone(), inputs[place], requires_grad)
        restore_states([(generator, after) for generator, before, after in self._draws if replays(generator, before)])
        fresh = {id(leaf): _copied(leaf) for leaf in leaves}
        fresh.update({id(tensor): _fresh_output(function, tensor, inputs) for tensor in tensors})
        outputs = [inputs[leaf.place] if isinstance(leaf, _InputPlace) else fresh[id(leaf)] for leaf in leaves]
        return pytree.tree_unflatten(outputs, self._spec)

    def raise_error(self) -> None:
        """Raise what the function raised, if it did."""
        if self._error is not None:
            raise _without_traceback(self._error)

    def wait_before_using(self, tensors: Iterable[Tensor | None]) -> None:
        """Let the current streams wait for those of the forward, and keep ``tensors`` until they are done with them."""
        if self._sync_point is not None:
            self._sync_point.wait_before_using([tensor for tensor in tensors if tensor is not None])


class _NoBackward(torch.autograd.Function):
    """The node between the inputs and the outputs of a kept function, in a replay. Its backward raises."""

    @staticmethod
    def forward(ctx: Any, function: Function, output: Tensor, *inputs: Tensor) -> Tensor:
        ctx.function = function
        return output.detach()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        rule = "a backward inside of a region cannot go through what torchckpt.keep keeps"
        received = f"the gradient of a result of {name_of(ctx.function)}, in a replay"
        works = "the function, and the backward through it, in one keep(); or the function without keep()"
        raise RecomputationError(str(Fault(rule, received, works)))


_no_backward = apply_of(_NoBackward)


def _fresh_output(function: Function, output: Tensor, inputs: Inputs) -> Tensor:
    """A new tensor with the values of ``output``: what a replay does to it, such as a hook, stays in the replay."""
    if isinstance(output, nn.Parameter):
        return output
    if output.is_leaf:
        fresh = output.detach().requires_grad_(output.requires_grad)
    else:
        with torch.enable_grad():
            fresh = _no_backward(function, output, *(tensor for tensor in inputs.values() if tensor.requires_grad))
    return set_version(copy_attributes(output, fresh), output._version)


def _check_outputs(function: Function, leaves: Sequence[Any]) -> None:
    hidden = [leaf for leaf in leaves if hides_tensors(leaf)]
    if hidden:
        rule = f"{name_of(function)} returned tensors in an object that is no pytree, where they are out of sight"
        works = "return a tuple or a dict; or torch.export.register_dataclass(Routed)"
        raise_fault(Fault(rule, f"tensors in an object of {type(hidden[0]).__qualname__}", works), "keep")
    iterators = [leaf for leaf in leaves if isinstance(leaf, Iterator)]
    if iterators:
        rule = f"{name_of(function)} returned an iterator, which is at its end in the replay"
        raise_fault(Fault(rule, f"a {type(iterators[0]).__qualname__}", "keep(lambda x: list(parts(x)), x)"), "keep")


def _copied(leaf: Any) -> Any:
    """``leaf``, or a copy if it is data that a region may change behind it. What is in it stays the same."""
    if isinstance(leaf, (Tensor, nn.Module, type)):
        return leaf
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and isinstance(leaf, numpy.ndarray)
    return shallow_copy(leaf) if is_array or isinstance(leaf, _DATA) or dataclasses.is_dataclass(leaf) else leaf


def _without_traceback(error: Exception) -> Exception:
    """A twin of ``error``, without the tensors that it holds of all calls that it came through."""
    base = next(cls for cls in type(error).__mro__ if cls.__module__ == "builtins")
    # An __init__ of its own may want other arguments.
    twin: Exception = base.__new__(type(error), *map(_without_graph, error.args))
    twin.__dict__.update({name: _without_graph(value) for name, value in error.__dict__.items()})
    return twin


def _without_graph(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _write(function: Function, value: Tensor, tensor: Tensor, requires_grad: bool) -> None:
    if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
        raise _other_arguments(function)
    with torch.no_grad():
        tensor.detach().copy_(value)
    set_version(tensor, value._version)
    if requires_grad and not tensor.requires_grad:
        tensor.requires_grad_()


def _other_arguments(function: Function) -> RecomputationError:
    rule = "the replay of a region called torchckpt.keep on other tensors than its forward"
    received = f"{name_of(function)} with other arguments, or holding others, or with one that it resizes"
    works = "what it needs as arguments, keep(router, x), of the same shapes each time"
    return RecomputationError(str(Fault(rule, received, works)))


# buffers ------------------------------------------------------------------------------------------------------------


Buffers: TypeAlias = dict[Any, tuple[Tensor | None, int]]
"""Buffers by their keys in a layout, each with a number that changes with its version."""


def buffers_of(module_state: ModuleState | None) -> Buffers:
    """The buffers of the modules of a region, as they are now."""
    if module_state is None:
        return {}
    layout = module_state.layout
    counters = {key: table.get(COUNTER) for key, table in layout.statistics.items()}  # BatchNorm moves others unseen
    buffers = [(key, tensor, counters.get(key)) for key, tensor in layout.buffers()]
    return {key: (of, sum(version_of(x) for x in (of, counter) if x is not None)) for key, of, counter in buffers}


def changed_buffers(module_state: ModuleState | None, before: Buffers) -> list[tuple[dict[str, Any], str, Copy | None]]:
    """The buffers that differ from ``before``: for each its dictionary, its name there, and a copy of it."""
    changed: list[tuple[dict[str, Any], str, Copy | None]] = []
    for key, (tensor, version) in buffers_of(module_state).items():
        then = before.get(key)
        if module_state is not None and (then is None or then[0] is not tensor or then[1] != version):
            changed.append((module_state.layout.dict_of(key), key[1], None if tensor is None else Copy(tensor)))
    return changed
