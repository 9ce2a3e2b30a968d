"""rematerialize(): a module that trains within a byte budget, or with what it is told to keep."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchckpt.errors import CheckpointError, Fault, raise_faults
from torchckpt.graph.backend import Backend
from torchckpt.graph.call import Call, CompiledCall, state_of, tensors_of
from torchckpt.graph.choose import Chooser, Costs
from torchckpt.graph.guard import changed, guard_of, warn_of_retraces
from torchckpt.graph.keep import Keep
from torchckpt.graph.notes import is_tracing
from torchckpt.graph.outside import Outside
from torchckpt.graph.private.runtime import is_transformed
from torchckpt.graph.turns import TURNS
from torchckpt.graph.wrapped import check_bare, refuse_copies
from torchckpt.model.remat.budget import Budget
from torchckpt.model.remat.plan import Plan

__all__ = ["Rematerialized", "rematerialize"]


def rematerialize(
    model: nn.Module,
    *example: Any,
    keep: Keep | Plan = None,
    budget: Budget | None = None,
    engine: Literal["eager", "inductor"] = "eager",
    costs: Costs = "roofline",
    rng: Literal["keep", "replay"] = "keep",
    exact: bool = False,
) -> Rematerialized:
    """``model`` with a forward and a backward that keep less, and recompute the rest right before it is needed.

    The call is traced once with its derivatives (by AOTAutograd), for every kind of inputs that it gets. On a CPU, with
    ``engine="eager"``, outputs, gradients, buffers and random numbers are those of the model, bit for bit, and the
    peak is the one that the plan says.

    Whatever else a forward depends on has it traced anew: shapes, arguments, modes, hooks, attributes of modules, and
    the globals, closures and fields of objects that its code names. The forward's Python runs for a trace alone: what
    it counts or seeds is not counted or seeded, and what it returns is all that comes out.

    Where torch traces another kernel than it runs (``nn.GRU``, ``prod``), the last bits may differ. What an operation
    allocates is seen on made-up numbers: where it raises on them, a copy of all that it reads and writes is planned,
    with a warning.

    >>> step = graph.rematerialize(model, inputs, budget="6GiB")
    >>> print(step.plan)                    # peak, what is saved, what is recomputed, what that costs
    >>> loss_of(step(inputs)).backward()    # as ever

    Args:
        model: stays as it is; the result shares its parameters, buffers and mode.
        example: inputs to plan for, at once. Nothing is run on them (by Inductor a forward, which leaves no trace);
            but each kind of operation once, on made-up numbers. Without an example the first call plans.
        keep: what to save for the backward. ``"collection"``: what is marked by :func:`mark`. ``"speed"``: outputs of
            convolutions and products of matrices. ``"memory"``: about the square root of the values that separate
            inputs from outputs (Chen 2016; Gruslys's and Bulatov's heuristics for TensorFlow). Names of modules and
            marks, as they are, as patterns (``"layers.*.mlp"``), or in part. A function of a
            :class:`~torchckpt.graph.values.Value`. A plan, made before. Default: all but what is inside a
            :func:`region`; under a budget, what the planner says.
        budget: bytes that a forward and its backward may allocate above what is there before them: activations and
            gradients. What a loss outside of the model allocates comes beside it: let the model return its loss.
            ``"6GiB"``; an int; or a float, a share of the peak that keeps everything. What ``keep`` names is
            kept beside. Default: none.
        engine: ``"eager"`` runs the operations of the trace; ``"inductor"`` compiles them, which fuses operations and
            may change the last bits.
        costs: ``"roofline"`` counts, ``"profile"`` runs each kind of operation and takes its time; or seconds by
            operator, such as ``{"aten.mm": 2e-3}``; others are counted.
        rng: ``"keep"`` keeps what random operations made (of a dropout its mask, a byte an element); ``"replay"`` may
            draw it again, from a saved state of the generator.
        exact: prove the least time under the budget (OR-tools; ``pip install 'torchckpt[exact]'``); for small steps.

    Returns:
        A module with the call, the ``state_dict`` and the parameters of ``model``, and a ``plan``.

    Raises:
        ArgumentError: an argument breaks a rule; the message lists them all.
        BudgetInfeasible: no schedule was found within the budget; it has the least bytes found, and their plan.
        CaptureError: the call cannot be traced: it depends on the values of tensors, or changes its inputs.
    """
    caller = "rematerialize()"
    faults = []
    if not isinstance(model, nn.Module):
        faults.append(Fault("the first argument is a module", repr(model), "graph.rematerialize(model, inputs)"))
    if engine not in ("eager", "inductor"):
        faults.append(Fault('engine is "eager" or "inductor"', repr(engine), 'engine="eager"'))
    if engine == "inductor" and rng == "replay":
        faults.append(Fault("Inductor draws random numbers its own way", 'rng="replay"', 'engine="eager"; rng="keep"'))
    raise_faults(caller, faults)
    check_bare(caller, model)
    made = Rematerialized(model, partial(Chooser, caller, keep, budget, costs, rng, exact), engine)
    if example:
        with _blaming(example):
            made.prepare(*example)
    return made


@contextmanager
def _blaming(example: tuple[Any, ...]) -> Iterator[None]:
    """Where the model raises on an example in parentheses of its own, say that it is called with what is in them."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if len(example) == 1 and isinstance(example[0], (tuple, list)):
            rule = "an example is what the model is called with, one argument after the other"
            received = f"one {type(example[0]).__name__}, of which the model says: {str(error).splitlines()[0]}"
            raise_faults("rematerialize()", [Fault(rule, received, "graph.rematerialize(model, *example)")])
        raise


_SHARED = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)


_NEW = object()
"""In place of a call that is to be traced first."""


class Rematerialized(nn.Module):
    """What :func:`rematerialize` returns."""

    def __init__(self, model: nn.Module, chooser: Callable[[], Chooser], engine: str) -> None:
        super().__init__()
        self.__dict__.update((name, model.__dict__[name]) for name in _SHARED)
        self.__dict__.update(original=model, _chooser=chooser, _engine=engine, _calls={}, _latest=None, _outside=None)
        self.__dict__.update(_backend=Backend(chooser), _compiling=threading.Lock())  # it checks chooser's arguments
        self.__dict__["_ignored"] = set[tuple[str, str]]()  # attributes that the forward itself sets

    @property
    def plan(self) -> Plan:
        """Of the inputs that came last; of the example, before the first call."""
        if self._latest is None:
            rule = "there is a plan when there are inputs to plan for"
            raise_faults("plan", [Fault(rule, "no example, and no call yet", "graph.rematerialize(model, inputs)")])
        return cast(Plan, self._latest.plan)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """One for each kind of inputs so far: shapes, dtypes, mode."""
        return tuple(call.plan for call in self._calls.values() if call.plan is not None)

    def prepare(self, *args: Any, **kwargs: Any) -> Plan:
        """Trace and plan a call, and run nothing of it."""
        if self._call(args, kwargs) is None:
            rule = "a step is planned where something is differentiated"
            works = "model.requires_grad_(), and no torch.no_grad() around"
            raise_faults("rematerialize()", [Fault(rule, "a call in which nothing requires a gradient", works)])
        return self.plan

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            from torchckpt.graph.outside_graph import outside_graph  # imports Dynamo

            return outside_graph(self.forward, args, kwargs)
        call = self._call(args, kwargs)
        if call is not None:
            return call()
        with TURNS.calling():
            return self.original(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        rule = "a rematerialized module has graphs of its own, which nothing else compiles"
        works = 'graph.rematerialize(..., engine="inductor"); or torch.compile(model, backend=graph.backend(...))'
        raise_faults("compile()", [Fault(rule, "compile() of the result of rematerialize()", works)])

    @property
    def training(self) -> bool:
        """The original's: both are in one mode."""
        return bool(self.original.training) if "original" in self.__dict__ else True

    @training.setter
    def training(self, mode: bool) -> None:
        if "original" in self.__dict__:
            self.original.training = mode

    def __getattr__(self, name: str) -> Any:
        original = self.__dict__.get("original")
        if original is None or name == "original":
            return super().__getattr__(name)
        return getattr(original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What is set is set on the original, whose forward reads it; see there for what a trace has read before."""
        if "original" in self.__dict__ and name not in self.__dict__ and name not in ("training", "__class__"):
            setattr(self.original, name, value)
        else:
            super().__setattr__(name, value)

    def train(self, mode: bool = True) -> Rematerialized:
        """As the original does it, which may keep parts of itself in evaluation."""
        self.original.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.original.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Called where it is a part of another module, which then goes on with its modules."""
        self.original._load_from_state_dict(*args, **kwargs)

    def apply(self, fn: Any) -> Rematerialized:
        self.original.apply(fn)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Rematerialized:
        self.original._apply(fn, recurse)
        return self

    def __reduce__(self) -> Any:
        return Rematerialized, (self.original, self._chooser, self._engine)

    def _replicate_for_data_parallel(self) -> None:
        refuse_copies()

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        """The call on these inputs, by the trace that fits them. None where it saves nothing: no derivative is wanted,
        or it is traced, or transformed by torch.func."""
        if is_tracing() or is_transformed():
            return None
        with TURNS.calling():
            call = self._known(args, kwargs)
        if call is not _NEW:
            return cast("Callable[[], Any] | None", call)
        with TURNS.tracing() if self._engine == "eager" else self._compiling:  # Dynamo has a lock of its own
            call = self._known(args, kwargs)  # another thread may have traced it meanwhile
            return self._trace(args, kwargs) if call is _NEW else cast("Callable[[], Any] | None", call)

    def _known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | object | None:
        """The call, or that it is to be traced first."""
        state = state_of(self.original)
        tensors = tensors_of(state, pytree.tree_leaves((args, kwargs)))
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            return None
        try:
            guard = guard_of(self.original, state, args, kwargs, self._outside.now() if self._outside else ())
        except Exception:
            check_bare("rematerialize()", self.original)
            raise
        call = self._calls.get(guard.without(self.original, self._ignored) if self._ignored else guard, _NEW)
        return call if call is _NEW else self._bound(call, tensors, args, kwargs)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        check_bare("rematerialize()", self.original)
        state = state_of(self.original)
        self.__dict__["_outside"] = outside = Outside(self.original)  # anew: objects may be others
        guard = guard_of(self.original, state, args, kwargs, outside.now())
        if self._engine == "eager":
            call: Call | CompiledCall = Call(self.original, tuple(state), args, kwargs, self._chooser())
        else:
            call = CompiledCall(self.original, self._backend, args, kwargs)
        after = guard_of(self.original, state, args, kwargs, outside.now())
        self._ignored.update(changed(self.original, guard, after))
        self._calls[guard.without(self.original, self._ignored)] = call
        warn_of_retraces(self.original, tuple(self._calls), args, kwargs)
        return self._bound(call, tensors_of(state, pytree.tree_leaves((args, kwargs))), args, kwargs)

    def _bound(
        self, call: Call | CompiledCall, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any] | None:
        if call.plan is None:  # no output has a derivative
            return None
        self.__dict__["_latest"] = call
        return partial(call, tensors, args, kwargs)
