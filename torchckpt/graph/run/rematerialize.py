"""rematerialize(), rematerialize_(): a new module, or the module itself, that trains within a byte budget."""
from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, Literal

import torch
from torch import nn

from torchckpt.errors import Fault, called, check, raise_fault
from torchckpt.graph.keep import Keep
from torchckpt.graph.planner import Costs, GraphPlanner
from torchckpt.graph.private.dynamo import outside_graph
from torchckpt.graph.run.calls import Calls, Planned, module_faults, option_faults
from torchckpt.graph.trace.reason import check_bare, refuse_copies
from torchckpt.planning.budget import Budget
from torchckpt.planning.remat.plan import Plan
from torchckpt.regions.wrap.mixin import Mixin, plain_forward, put, take

__all__ = ["RematerializeHandle", "Rematerialized", "rematerialize", "rematerialize_"]


@called("rematerialize()")
def rematerialize(
    model: nn.Module,
    *example: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    keep: Keep | Plan = None,
    budget: Budget | None = None,
    engine: Literal["eager", "inductor"] = "eager",
    costs: Costs = "roofline",
    rng: Literal["keep", "replay"] = "keep",
    exact: bool = False,
) -> Rematerialized:
    """Make a module that computes like ``model``, but keeps fewer values for the backward and recomputes the others.

    AOTAutograd traces the call with its derivatives, once for every kind of inputs. On a CPU with ``engine="eager"``,
    outputs, gradients, buffers and random numbers are equal to the model's, bit for bit, and the peak is the one that
    the plan states.

    A call is traced anew when anything else changes that the forward depends on: shapes, arguments, modes, hooks,
    attributes of modules, and the globals, closures and object fields that its code names. The Python code of the
    forward runs only during a trace. So side effects, such as a counter or a seed, happen only then; a call has no
    result but its return value.

    Where torch traces a different kernel than eager runs (``nn.GRU``, ``prod``), the last bits may differ. To measure
    the bytes that it allocates, each operation runs once on made-up numbers. If it raises an error on them, the plan
    assumes a copy of all its inputs and outputs, and a warning says so.

    >>> step = graph.rematerialize(model, inputs, budget="6GiB")
    >>> print(step.plan)                    # peak, what is saved, what is recomputed, what that costs
    >>> loss_of(step(inputs)).backward()    # as before

    The logger ``torchckpt`` gets one line for each trace, with its reason. To change a part of a module in place, see
    :func:`~torchckpt.graph.rematerialize_`.

    Args:
        model: is not changed; the result shares its parameters, buffers and mode.
        example: inputs to plan for at once. The model does not run on them (with Inductor it runs one forward, without
            lasting effects). Each kind of operation runs once, on made-up numbers. Default: the first call plans.
        example_kwargs: the keyword arguments of the example.
        keep: what to save for the backward. ``"collection"``: what is marked by :func:`mark`. ``"speed"``: outputs of
            convolutions and products of matrices. ``"memory"``: about the square root of the values that separate
            inputs from outputs (Chen 2016; Gruslys's and Bulatov's heuristics for TensorFlow). Names of modules and
            marks: in full, as patterns (``"layers.*.mlp"``), or a part of the name. A function that takes a
            :class:`~torchckpt.graph.keep.Value` and returns whether to keep it. An earlier plan. Default: all
            values outside of a :func:`region`; with a budget, the values that the planner chooses.
        budget: bytes that a forward and its backward may allocate beyond the memory in use before them: activations and
            gradients. A loss outside of the model is not included: let the model return its loss. ``"6GiB"``; a
            number; or a share of the peak with everything kept: ``"50%"``. The first plan turns a share into bytes,
            which later plans get, too: a smaller last batch fits. Values that ``keep`` names are kept
            within the budget. Default: no budget.
        engine: ``"eager"`` runs the operations of the trace; ``"inductor"`` compiles them, which fuses operations and
            may change the last bits.
        costs: the time of each operation. ``"roofline"`` estimates it from shapes; ``"profile"`` runs each kind of
            operation and measures it; a dict gives seconds by operator, such as ``{"aten.mm": 2e-3}``, and estimates
            the others.
        rng: ``"keep"`` keeps the results of random operations (the mask of a dropout, one byte per element);
            ``"replay"`` may draw them again, from a saved state of the generator.
        exact: prove the least time under the budget (OR-tools; ``pip install 'torchckpt[exact]'``); for small steps.

    Returns:
        A module with the call signature, ``state_dict`` and parameters of ``model``, and a ``plan``.

    Raises:
        ArgumentError: an argument breaks a rule; the message lists them all.
        BudgetInfeasible: no schedule was found within the budget. The error has the least bytes found, and their plan.
        CaptureError: the call cannot be traced: it depends on the values of tensors, or changes its inputs.
    """
    check([*module_faults("rematerialize", model), *option_faults(engine, rng, example_kwargs)])
    check_bare(model)
    rematerialized = Rematerialized(model, partial(GraphPlanner, keep, budget, costs, rng, exact, {}), engine)
    rematerialized._prepare_example(example, example_kwargs)
    return rematerialized


_SHARED = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)
_MADE = (*_SHARED, "original", "_planner", "_engine", "_calls")


class Rematerialized(Planned, nn.Module):
    """The module that :func:`rematerialize` returns."""

    def __new__(cls, model: nn.Module, *_: Any) -> Rematerialized:
        return super().__new__(_class_for(model))

    def __init__(self, model: nn.Module, planner: Callable[[], GraphPlanner], engine: str) -> None:
        super().__init__()
        self.__dict__.update((name, model.__dict__[name]) for name in _SHARED)
        self.__dict__.update(original=model, _planner=planner, _engine=engine)
        self.__dict__["_calls"] = Calls("rematerialize()", model, model, planner, engine)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return outside_graph(self.forward, args, kwargs)
        return self._calls.run(self.original, args, kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        rule = "torch.compile cannot compile a rematerialized module, which runs its own graphs"
        works = 'graph.rematerialize(..., engine="inductor"); or torch.compile(model, backend=graph.backend(...))'
        raise_fault(Fault(rule, "compile() of the result of rematerialize()", works), "compile()")

    @property
    def training(self) -> bool:
        """The mode of the original module: both share it."""
        return bool(self.original.training) if "original" in self.__dict__ else True

    @training.setter
    def training(self, mode: bool) -> None:
        if "original" in self.__dict__:
            self.original.training = mode

    def __getattr__(self, name: str) -> Any:
        original = self.__dict__.get("original")
        if original is None or name == "original":
            return super().__getattr__(name)
        if name == "__signature__":  # for inspect.signature(step), which asks the instance before the class
            return inspect.signature(original)
        return getattr(original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the attribute on the original, whose forward reads it; the next call is then traced anew. A wrapper of
        this module's own forward, as accelerate adds for autocast, is set on this module."""
        is_method = isinstance(value, types.MethodType) and value.__self__ is self
        is_own = is_method or name in ("training", "__class__", "forward")
        if "original" in self.__dict__ and name not in self.__dict__ and not is_own:
            setattr(self.original, name, value)
        else:
            super().__setattr__(name, value)

    def train(self, mode: bool = True) -> Rematerialized:
        """Call ``train()`` of the original, which may keep some of its modules in evaluation mode."""
        self.original.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.original.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Called when this module is part of another one, which then loads the submodules itself."""
        self.original._load_from_state_dict(*args, **kwargs)

    def apply(self, fn: Any) -> Rematerialized:
        self.original.apply(fn)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Rematerialized:
        self.original._apply(fn, recurse)
        return self

    def __reduce__(self) -> Any:
        rest = {name: value for name, value in self.__dict__.items() if name not in _MADE}  # its own hooks
        return Rematerialized, (self.original, self._planner, self._engine), rest

    def _replicate_for_data_parallel(self) -> None:
        refuse_copies()


def _class_for(model: nn.Module) -> type[Rematerialized]:
    """A subclass whose forward has the model's signature: tools read from it which inputs a model takes."""
    of_model: Any = getattr(type(model), "forward", None)
    noted: dict[str, object] = {"__wrapped__": of_model}
    try:
        signature = inspect.signature(model.forward)
    except (AttributeError, TypeError, ValueError):
        return Rematerialized
    if "forward" in model.__dict__:
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        noted["__signature__"] = signature.replace(parameters=[first, *signature.parameters.values()])
    name = f"Rematerialized{type(model).__name__}"
    for cls in Rematerialized.__subclasses__():
        if cls.__name__ == name and cls.forward.__dict__ == {**of_model.__dict__, **noted}:
            return cls

    @wraps(of_model)
    def forward(self: Rematerialized, *args: Any, **kwargs: Any) -> Any:
        return Rematerialized.forward(self, *args, **kwargs)

    forward.__dict__.update(noted)
    names = {name: getattr(Rematerialized, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(name, (Rematerialized,), {**names, "forward": forward})


# in place -------------------------------------------------------------------------------------------------------------


_CALLER = "rematerialize_()"
_SETTING = "_torchckpt_rematerialized"


class _Bare(nn.Module):
    """A module's own forward without its hooks, which run at each call, around the traced part."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__.update((name, module.__dict__[name]) for name in _SHARED)
        self.__dict__["_forward"] = plain_forward(module, _InPlace)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)  # type: ignore[operator]  # a module's attributes may be modules


class _Setting:
    """The options and the traced calls of one module. A copy of the module gets its own traced calls."""

    __slots__ = ("calls", "engine", "planner")

    def __init__(self, planner: Callable[[], GraphPlanner], engine: str) -> None:
        self.planner, self.engine = planner, engine
        self.calls: Calls | None = None

    def __reduce__(self) -> Any:
        return _Setting, (self.planner, self.engine)

    def calls_of(self, module: nn.Module) -> Calls:
        if self.calls is not None and self.calls.model is not module:  # a shallow copy, at its first call
            module.__dict__[_SETTING] = setting = _Setting(self.planner, self.engine)
            return setting.calls_of(module)
        if self.calls is None:
            self.calls = Calls(_CALLER, module, _Bare(module), self.planner, self.engine)
        return self.calls


def _run(plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], setting: _Setting) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return outside_graph(_run, (plain, args, kwargs, setting), {})
    return setting.calls_of(plain.__self__).run(plain, args, kwargs)  # type: ignore[attr-defined]  # it is a method


class _InPlace(Mixin):
    """A mixin in front of the module's class, which runs each call from its trace."""

    _torchckpt_setting = _SETTING
    _torchckpt_call = staticmethod(_run)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        if _SETTING in self.__dict__:
            Rematerialized.compile(self)  # type: ignore[arg-type]  # the same error
        super().compile(*args, **kwargs)  # type: ignore[misc]  # of the module that this stands in front of


class RematerializeHandle(Planned, AbstractContextManager["RematerializeHandle"]):
    """Undoes one :func:`rematerialize_`, and has its plans. As a context manager, it undoes the change at its end."""

    def __init__(self, module: nn.Module, setting: _Setting) -> None:
        self._module, self._setting, self._calls = module, setting, setting.calls_of(module)

    def remove(self) -> None:
        """Let the module run as it did before. A second call does nothing."""
        if self._module.__dict__.get(_SETTING) is self._setting:
            take(self._module, _InPlace)

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        is_on, plans = self._module.__dict__.get(_SETTING) is self._setting, self.plans
        what = f"{type(self._module).__name__}, {'in place' if is_on else 'removed'}"
        return f"<RematerializeHandle: {what}, {repr(plans[-1]).strip('<>') if plans else 'no plan yet'}>"


@called(_CALLER)
def rematerialize_(
    module: nn.Module,
    *example: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    keep: Keep | Plan = None,
    budget: Budget | None = None,
    engine: Literal["eager", "inductor"] = "eager",
    costs: Costs = "roofline",
    rng: Literal["keep", "replay"] = "keep",
    exact: bool = False,
) -> RematerializeHandle:
    """Do as :func:`~torchckpt.graph.rematerialize`, but in place: ``module`` itself changes, until the handle's
    ``remove()``.

    Its ``state_dict`` keys, ``isinstance`` checks, ``repr``, signature and hooks stay the same, and so does its place
    in other modules. A copy, or a module loaded from a pickle, traces with its own weights. Hooks of ``module`` itself
    run at each call, around the traced part; hooks of its children are part of the trace.

    >>> handle = graph.rematerialize_(self.model, budget="50%")     # in a LightningModule, or before a Trainer
    >>> self.model(inputs).loss.backward()
    >>> print(handle.plan)
    >>> handle.remove()

    Args:
        module: the module to change. Its ``forward`` is a method of its class.
        example, example_kwargs, keep, budget, engine, costs, rng, exact: as for :func:`rematerialize`.

    Returns:
        A handle with ``remove()`` and ``plan``; as a context manager, it calls ``remove()`` at its end.

    Raises:
        ArgumentError, BudgetInfeasible, CaptureError: as for :func:`rematerialize`. The module is then unchanged.
    """
    faults = [*module_faults("rematerialize_", module), *_faults(module)]
    check([*faults, *option_faults(engine, rng, example_kwargs)])
    check_bare(module)
    setting = _Setting(partial(GraphPlanner, keep, budget, costs, rng, exact, {}), engine)
    put(module, _InPlace, setting)
    try:
        handle = RematerializeHandle(module, setting)
        handle._prepare_example(example, example_kwargs)
    except BaseException:
        take(module, _InPlace)
        raise
    return handle


def _faults(module: object) -> list[Fault]:
    """Faults of a module that cannot be changed in place."""
    if not isinstance(module, nn.Module):
        return []
    name = type(module).__name__
    if isinstance(module, Rematerialized):
        return [Fault("the module is rematerialized already", "what graph.rematerialize() returned", "its original")]
    if _SETTING in module.__dict__:
        return [Fault("the module is rematerialized already", f"{name}, rematerialized", "handle.remove() first")]
    if type(module) in (nn.ModuleList, nn.ModuleDict):
        received = f"{name}, whose layers are called one by one"
        works = "for layer in layers: graph.rematerialize_(layer)"
        return [Fault("the module has no forward that is called", received, works)]
    if "forward" in module.__dict__:
        rule, received = "the forward is not a method of the module's class", f"{name}, whose forward is set on it"
        return [Fault(rule, received, "step = graph.rematerialize(model, inputs)")]
    return []
