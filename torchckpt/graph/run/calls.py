"""Calls: all calls of one module, traced once for each kind of inputs, and run from the trace afterwards."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchckpt.errors import (
    ArgumentError,
    CaptureError,
    CheckpointError,
    Fault,
    brief,
    called,
    raise_fault,
    text_of,
    without_generators,
)
from torchckpt.graph.annotations import is_tracing, named_modules
from torchckpt.graph.planner import GraphPlanner
from torchckpt.graph.private.dynamo import compile_lock, compiling_whole, recompile_limit_hit
from torchckpt.graph.private.runtime import call_with, is_traced_by_others, is_transformed
from torchckpt.graph.progress import log, log_unread, stopwatch
from torchckpt.graph.run.backend import Backend
from torchckpt.graph.step.halves import Halves, Unread, narrowed
from torchckpt.graph.trace.capture import TRACE_LOCK, Capture, restoring_modules, setting_nothing
from torchckpt.graph.trace.free_variables import FreeVariables
from torchckpt.graph.trace.guard import argument_names, changed, guard_of, places_of
from torchckpt.graph.trace.reason import check_bare, reason_of, warn_of_retraces
from torchckpt.planning.budget import read
from torchckpt.planning.remat.plan import Plan
from torchckpt.tensors import version_of

__all__ = ["Calls", "Planned", "module_faults", "option_faults"]

_NEW = object()
"""Stands for a call that has not been traced yet."""


def module_faults(function: str, model: object) -> list[Fault]:
    """Faults of the first argument, which must be a module."""
    if isinstance(model, nn.Module):
        return []
    works = f"graph.{function}(model, inputs)"
    if isinstance(model, type) and issubclass(model, nn.Module):
        works = f"graph.{function}({model.__name__}(...), inputs): the class is called first"
    elif isinstance(model, (list, tuple)):
        works = f"graph.{function}(nn.Sequential(*layers), inputs); or each layer by itself"
    elif callable(model):
        works += ", of a module whose forward calls the function"
    return [Fault("the first argument is not a module", brief(model), works)]


def option_faults(engine: str, rng: str, example: object) -> Iterator[Fault]:
    """Faults of the arguments that :class:`GraphPlanner` does not check."""
    if engine not in ("eager", "inductor"):
        yield Fault('engine is neither "eager" nor "inductor"', repr(engine), 'engine="eager"')
    if engine == "inductor" and rng == "replay":
        wrong = "Inductor draws random numbers by itself, and cannot replay them"
        yield Fault(wrong, 'rng="replay"', 'engine="eager"; rng="keep"')
    if example is not None and not (isinstance(example, Mapping) and all(isinstance(name, str) for name in example)):
        rule = "example_kwargs is not a dict of the keywords that the model is called with"
        yield Fault(rule, type(example).__name__, 'example_kwargs={"input_ids": tokens, "labels": tokens}')


class Calls:
    """The traced calls of ``model``, by their guards.

    Args:
        function: name of the public function, for errors and the log.
        model: the module whose submodules, attributes, parameters and buffers are guarded.
        run: the module that is traced: ``model`` itself, or one that shares its contents.
    """

    def __init__(
        self, function: str, model: nn.Module, run: nn.Module, planner: Callable[[], GraphPlanner], engine: str
    ) -> None:
        self.function, self.model, self._run, self._planner, self._engine = function, model, run, planner, engine
        planner()  # checks its arguments
        self._keywords = _keywords_of(model)
        self.known: dict[Any, Call | CompiledCall] = {}
        self.latest: Call | CompiledCall | None = None
        self._outside: FreeVariables | None = None
        self._ignored = set[tuple[str, str]]()  # attributes that the forward itself sets

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        """The traced call for these inputs, traced first if it is new. None if the module must run as it is: without
        derivatives, inside another trace, or inside a transform of torch.func."""
        if is_tracing() or is_traced_by_others() or is_transformed():
            return None
        kwargs = self._ordered(kwargs)
        with TRACE_LOCK.calling():
            call = self._known(args, kwargs)
        if call is _NEW:
            with TRACE_LOCK.tracing() if self._engine == "eager" else compile_lock():
                call = self._known(args, kwargs)  # another thread may have traced it meanwhile
                if call is _NEW:
                    with called(self.function):
                        call = self._trace(args, kwargs)
        return cast("Callable[[], Any] | None", call)

    def _ordered(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """``kwargs`` in the order of the forward's parameters: calls that differ only in that order are the same."""
        if len(kwargs) < 2:
            return kwargs
        return {name: kwargs[name] for name in (*self._keywords, *kwargs) if name in kwargs}

    def run(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the traced call, or ``plain`` if :meth:`call` returns None."""
        call = self.call(args, kwargs)
        if call is not None:
            return call()
        with TRACE_LOCK.calling():
            return plain(*args, **kwargs)

    def _known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | object | None:
        """The traced call; ``_NEW`` if it must be traced first; None if the module must run as it is."""
        state = _state_of(self.model)
        tensors = _inputs_of(state, pytree.tree_leaves((args, kwargs)))
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            return None
        try:
            guard = guard_of(self.model, state, args, kwargs, self._outside.now() if self._outside else ())
        except Exception:
            with called(self.function):
                check_bare(self.model)
            raise
        call = self.known.get(guard.without(self.model, self._ignored), _NEW)
        return call if call is _NEW else self._bound(cast(Call, call), tensors, args, kwargs)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        check_bare(self.model)
        state = _state_of(self.model)
        self._outside = outside = FreeVariables(self.model)  # search again: objects may have been replaced
        guard = guard_of(self.model, state, args, kwargs, outside.now())
        known = guard.without(self.model, self._ignored)
        reason = partial(reason_of, self.model, tuple(self.known), known, args, kwargs)
        seconds = stopwatch()
        if self._engine == "eager":
            with setting_nothing(self.model):
                call: Call | CompiledCall = Call(self.model, self._run, tuple(state), args, kwargs, self._planner())
        else:
            call = CompiledCall(self._run, Backend(self._planner), args, kwargs)
        log(self.function, self.model, reason, seconds(), call.planning_seconds, call.plan)
        after = guard_of(self.model, state, args, kwargs, outside.now())
        self._ignored.update(changed(self.model, guard, after))
        self.known[guard.without(self.model, self._ignored)] = call
        warn_of_retraces(self.model, tuple(self.known), args, kwargs)
        return self._bound(call, _inputs_of(state, pytree.tree_leaves((args, kwargs))), args, kwargs)

    def _bound(
        self, call: Call | CompiledCall, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any] | None:
        if call.plan is None:  # no output has a derivative
            return None
        self.latest = call
        return partial(call, tensors, args, kwargs)


class Planned:
    """What has the plans of the calls of one module, which it traces."""

    _calls: Calls

    @property
    def plan(self) -> Plan:
        """The plan for the latest inputs; before the first call, for the example.

        After a backward in which some outputs had no gradient, it is the part that this backward ran, with the bytes
        that it took. Its ``whole`` is the plan for the gradients of all outputs.
        """
        call = self._calls.latest
        if call is None:
            rule = "there is no plan yet: it needs inputs, an example or a first call"
            works = f"graph.{self._calls.function[:-1]}model, inputs)"
            raise_fault(Fault(rule, "no example, and no call yet", works), "plan")
        return cast(Plan, call.plan)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans so far, one for each kind of inputs (shapes, dtypes, mode)."""
        return tuple(call.plan for call in list(self._calls.known.values()) if call.plan is not None)

    def prepare(self, *args: Any, **kwargs: Any) -> Plan:
        """Trace and plan a call with these inputs, without running it."""
        if self._calls.call(args, kwargs) is None:
            rule = "there is nothing to plan: gradients are disabled, or no output depends on what requires one"
            works = "model.requires_grad_(), outside of torch.no_grad(), and a forward that returns what depends on it"
            raise_fault(Fault(rule, "a call in which nothing requires a gradient", works), self._calls.function)
        return self.plan

    def _prepare_example(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> None:
        """Trace and plan a call with the example; without one, do nothing."""
        if args or kwargs:
            with _blaming(self._calls.function, args):
                self.prepare(*args, **(kwargs or {}))


def _keywords_of(model: nn.Module) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # the forward is not a Python function
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


@contextmanager
def _blaming(function: str, example: tuple[Any, ...]) -> Iterator[None]:
    """If the model raises because the example was passed in a wrong form, raise an error that shows the right call."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        works = _instead(function[:-2], example)
        if works is None:
            raise
        rule = "the example is not the model's arguments, one after the other"
        first = text_of(error).partition("\n")[0]
        received = f"one {type(example[0]).__name__}, on which the model raises: {first}"
        raise ArgumentError(str(Fault(rule, received, works))) from without_generators(error)


def _instead(function: str, example: tuple[Any, ...]) -> str | None:
    """The call that the user probably meant; None if it cannot be guessed."""
    if len(example) == 1 and isinstance(example[0], (tuple, list)):
        if example[0] and all(isinstance(size, int) for size in example[0]):  # a shape
            return f"graph.{function}(model, torch.randn({', '.join(map(str, example[0]))}))"
        return f"graph.{function}(model, *example)"
    if len(example) == 1 and isinstance(example[0], Mapping):
        return f"graph.{function}(model, example_kwargs=example)"
    budgets = [value for value in example if isinstance(value, str) and read(value) is not None]
    return f"graph.{function}(model, inputs, budget={budgets[0]!r})" if budgets else None


# one call -------------------------------------------------------------------------------------------------------------


class Call:
    """A traced call of a model, for one kind of inputs; what runs is ``run``: ``model`` itself, or a module that shares
    its contents."""

    def __init__(
        self, model: nn.Module, run: nn.Module, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any],
        planner: GraphPlanner,
    ) -> None:
        self._model, self._run, self._names = model, run, names
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        self._leaves = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # keeps no tensor alive
        tensors = _inputs_of(_state_of(model), leaves)
        self._places = places_of(tensors[: len(names)], tensors[len(names) :])
        self._firsts = [self._places.index(place) for place in range(max(self._places, default=-1) + 1)]
        paths = (path for path, leaf in argument_names(args, kwargs) if isinstance(leaf, Tensor))
        data = dict(zip(self._places[len(names) :], paths))
        planner.inputs = frozenset(data)
        self.halves = Halves(planner.cost, planner, planner.replay, self._note)
        distinct = [tensors[first] for first in self._firsts]
        with restoring_modules(model), planner.watch.tracing(type(model).__name__) as tell:
            self._capture = Capture(self._function, distinct, data, self.halves, tell)
        self._capture.witness.refuse_left()
        self._capture.witness.refuse_changed()
        plan: Plan | None = getattr(planner, "plan", None)
        self._plans = {Unread(): plan}  # by what a backward went without
        self._noted = {Unread().missing}
        self.planning_seconds = planner.watch.planning_seconds

    @property
    def plan(self) -> Plan | None:
        """The plan, as the latest backward ran it; None where nothing is differentiated."""
        unread, whole = self.halves.unread, self._plans[Unread()]
        if whole is not None and unread not in self._plans:
            self._plans[unread] = narrowed(self.halves.joint, whole, unread)
        return self._plans[unread]

    def _note(self, unread: Unread) -> None:
        """Log a backward the first time that it goes without these gradients."""
        if unread.missing not in self._noted:
            self._noted.add(unread.missing)
            log_unread(self._model, len(unread.missing), lambda: self.plan)

    def __call__(self, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call. ``tensors`` are the parameters and buffers, then the tensors among the arguments."""
        outputs, replaced = self._capture([tensors[first] for first in self._firsts])
        if replaced:
            with TRACE_LOCK.calling():  # a trace at the same time would undo this
                for name, value in replaced.items():
                    owner, _, buffer = name.rpartition(".")
                    setattr(self._model.get_submodule(owner), buffer, value)
        return outputs

    def _function(self, *tensors: Tensor) -> Any:
        every = [tensors[place] for place in self._places]
        state, data = dict(zip(self._names, every)), iter(every[len(self._names) :])
        leaves = [next(data) if leaf is Tensor else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        replaced: dict[str, Tensor] = {}
        with named_modules(self._run, lambda: replaced.update(_replaced(self._run, state))):
            return call_with(self._run, state, args, kwargs), replaced


class CompiledCall:
    """A call compiled by Dynamo and Inductor, which choose the compiled code by the arguments of each call."""

    def __init__(self, model: nn.Module, backend: Backend, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._run = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
        with torch.random.fork_rng(), _keeping_buffers(model), compiling_whole():
            self._run(*args, **kwargs)
        self.plan: Plan | None = backend.plans[-1] if backend.plans else None
        self.planning_seconds = backend.planning_seconds

    def __call__(self, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._run(*args, **kwargs)
        except recompile_limit_hit():  # something else has changed that Dynamo looks at, as its own reset
            with compiling_whole():
                return self._run(*args, **kwargs)


@contextmanager
def _keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Run a forward inside this context; afterwards ``model`` has its buffers, with their values. One that was not
    changed is not written to: graphs that saved it wait for their backward."""
    owned = [(module, dict(module._buffers)) for module in model.modules()]
    before = [(buffer, version_of(buffer), buffer.detach().clone()) for buffer in model.buffers()]
    yield
    for module, buffers in owned:
        module._buffers.update(buffers)
    with torch.no_grad():
        for buffer, version, value in before:
            if version_of(buffer) != version:
                buffer.copy_(value)


def _replaced(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The new values, by name, of buffers that the forward has replaced, as in ``self.mean = ...``."""
    now = {name: buffer for name, buffer in model.named_buffers() if state.get(name, buffer) is not buffer}
    for name, buffer in now.items():
        before = state[name]
        if (before.shape, before.dtype) != (buffer.shape, buffer.dtype):
            rule = "the forward replaces a buffer by one of another shape or dtype"
            was, is_now = (f"{each.dtype} {tuple(each.shape)}" for each in (before, buffer))
            received = f"{name}: {was} became {is_now}"
            raise CaptureError(str(Fault(rule, received, f"self.{name}.copy_(value)")))
    return now


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _inputs_of(state: dict[str, Tensor], leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors that a trace takes: the state, then the tensors among the arguments."""
    return [*state.values(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
