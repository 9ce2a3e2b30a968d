"""rematerialize_(): change a module in place, so that its calls keep less memory for the backward."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from typing_extensions import Self

from torchckpt.errors import Fault, called, check
from torchckpt.graph.choose.keep import Keep
from torchckpt.graph.choose.planner import Costs, GraphPlanner
from torchckpt.graph.private.dynamo import outside_graph
from torchckpt.graph.run.calls import Calls, Planned, module_faults, option_faults
from torchckpt.graph.run.rematerialize import Rematerialized
from torchckpt.graph.trace.reason import check_bare
from torchckpt.planning.budget import Budget
from torchckpt.planning.remat.plan import Plan
from torchckpt.regions.wrap.mixin import Mixin, plain_forward, put, take

__all__ = ["RematerializeHandle", "rematerialize_"]

_CALLER = "rematerialize_()"
_SETTING = "_torchckpt_rematerialized"
_HELD = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class _Bare(nn.Module):
    """A module's own forward without its hooks, which run at each call, around the traced part."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__.update({name: module.__dict__[name] for name in _HELD}, _forward=plain_forward(module, _InPlace))

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


class RematerializeHandle(Planned):
    """Undoes one :func:`rematerialize_`, and has its plans. As a context manager, it undoes the change at its end."""

    def __init__(self, module: nn.Module, setting: _Setting) -> None:
        self._module, self._setting, self._calls = module, setting, setting.calls_of(module)

    def remove(self) -> None:
        """Let the module run as it did before. A second call does nothing."""
        if self._module.__dict__.get(_SETTING) is self._setting:
            take(self._module, _InPlace)

    def __enter__(self) -> Self:
        return self

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
    setting.planner()  # it checks its arguments
    put(module, _InPlace, setting)
    try:
        handle = RematerializeHandle(module, setting)
        handle._calls.prepare_example(example, example_kwargs)
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
