"""Calls: all calls of one module, traced once for each kind of inputs."""
from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchckpt.errors import CheckpointError, Fault, brief, called, raise_fault
from torchckpt.graph.annotations import is_tracing
from torchckpt.graph.choose.planner import GraphPlanner
from torchckpt.graph.private.runtime import is_transformed
from torchckpt.graph.progress import log, stopwatch
from torchckpt.graph.run.backend import Backend
from torchckpt.graph.run.call import Call, CompiledCall, inputs_of, state_of
from torchckpt.graph.trace.capture import TRACE_LOCK
from torchckpt.graph.trace.free_variables import FreeVariables
from torchckpt.graph.trace.guard import changed, guard_of
from torchckpt.graph.trace.reason import check_bare, reason_of, warn_of_retraces
from torchckpt.planning.budget import read
from torchckpt.planning.remat.plan import Plan

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


def option_faults(engine: str, rng: str, example: object) -> list[Fault]:
    """Faults of the arguments that :class:`GraphPlanner` does not check."""
    faults = []
    if engine not in ("eager", "inductor"):
        faults.append(Fault('engine is neither "eager" nor "inductor"', repr(engine), 'engine="eager"'))
    if engine == "inductor" and rng == "replay":
        wrong = "Inductor draws random numbers by itself, and cannot replay them"
        faults.append(Fault(wrong, 'rng="replay"', 'engine="eager"; rng="keep"'))
    if example is not None and not (isinstance(example, Mapping) and all(isinstance(name, str) for name in example)):
        rule = "example_kwargs is not a dict of the keywords that the model is called with"
        faults.append(Fault(rule, type(example).__name__, 'example_kwargs={"input_ids": tokens, "labels": tokens}'))
    return faults


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
        self._function, self.model, self._run, self._planner, self._engine = function, model, run, planner, engine
        self._compiling = threading.Lock()
        Backend(planner)  # checks the planner's arguments
        self._keywords = _keywords_of(model)
        self.known: dict[Any, Call | CompiledCall] = {}
        self._latest: Call | CompiledCall | None = None
        self._outside: FreeVariables | None = None
        self._ignored = set[tuple[str, str]]()  # attributes that the forward itself sets

    @property
    def plan(self) -> Plan:
        if self._latest is None:
            rule = "there is no plan yet: it needs inputs, an example or a first call"
            works = f"graph.{self._function[:-1]}model, inputs)"
            with called("plan"):
                raise_fault(Fault(rule, "no example, and no call yet", works))
        return cast(Plan, cast(Call, self._latest).plan)

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(call.plan for call in self.known.values() if call.plan is not None)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        if self.call(args, kwargs) is None:
            rule = "there is nothing to plan: no parameter or input requires a gradient, or gradients are disabled"
            works = "model.requires_grad_(), outside of torch.no_grad()"
            with called(self._function):
                raise_fault(Fault(rule, "a call in which nothing requires a gradient", works))
        return self.plan

    def prepare_example(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> None:
        """Trace and plan a call with the example; without one, do nothing."""
        if args or kwargs:
            with _blaming(self._function, args):
                self.prepare(args, dict(kwargs or {}))

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        """The traced call for these inputs, traced first if it is new. None if the module must run as it is: without
        derivatives, inside another trace, or inside a transform of torch.func."""
        if is_tracing() or is_transformed():
            return None
        kwargs = self._ordered(kwargs)
        with TRACE_LOCK.calling():
            call = self._known(args, kwargs)
        if call is _NEW:
            with TRACE_LOCK.tracing() if self._engine == "eager" else self._compiling:  # Dynamo has a lock of its own
                call = self._known(args, kwargs)  # another thread may have traced it meanwhile
                if call is _NEW:
                    with called(self._function):
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
        state = state_of(self.model)
        tensors = inputs_of(state, pytree.tree_leaves((args, kwargs)))
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            return None
        try:
            guard = guard_of(self.model, state, args, kwargs, self._outside.now() if self._outside else ())
        except Exception:
            with called(self._function):
                check_bare(self.model)
            raise
        call = self.known.get(guard.without(self.model, self._ignored), _NEW)
        return call if call is _NEW else self._bound(cast(Call, call), tensors, args, kwargs)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        check_bare(self.model)
        state = state_of(self.model)
        self._outside = outside = FreeVariables(self.model)  # search again: objects may have been replaced
        guard = guard_of(self.model, state, args, kwargs, outside.now())
        known = guard.without(self.model, self._ignored)
        reason = partial(reason_of, self.model, tuple(self.known), known, args, kwargs)
        seconds = stopwatch()
        if self._engine == "eager":
            call: Call | CompiledCall = Call(self.model, self._run, tuple(state), args, kwargs, self._planner())
        else:
            call = CompiledCall(self._run, Backend(self._planner), args, kwargs)
        log(self._function, self.model, reason, seconds(), call.planning_seconds, call.plan)
        after = guard_of(self.model, state, args, kwargs, outside.now())
        self._ignored.update(changed(self.model, guard, after))
        self.known[guard.without(self.model, self._ignored)] = call
        warn_of_retraces(self.model, tuple(self.known), args, kwargs)
        return self._bound(call, inputs_of(state, pytree.tree_leaves((args, kwargs))), args, kwargs)

    def _bound(
        self, call: Call | CompiledCall, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any] | None:
        if call.plan is None:  # no output has a derivative
            return None
        self._latest = call
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
        return self._calls.plan

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans so far, one for each kind of inputs (shapes, dtypes, mode)."""
        return self._calls.plans

    def prepare(self, *args: Any, **kwargs: Any) -> Plan:
        """Trace and plan a call with these inputs, without running it."""
        return self._calls.prepare(args, kwargs)


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
        received = f"one {type(example[0]).__name__}, on which the model raises: {str(error).splitlines()[0]}"
        raise_fault(Fault(rule, received, works))


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
