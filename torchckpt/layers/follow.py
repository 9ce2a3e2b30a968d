"""Follow: at each call of a chosen layer, which step it is of, and whether the call is kept.

Nobody says where a step begins. It begins where no call of the one before waits for its backward any more: each call
leaves a mark at the node of its output, which the backward reaches, or which is freed with the graph.

A step is known by its calls: the number of each layer, and the shapes of what it was called with. [1] A step whose
first call is of no known step recomputes everything, and is counted. [2] When such a step begins again, its plan is
made. [3] While calls are those of known steps, a call is kept if all of these keep it; any other call is recomputed.
"""
from __future__ import annotations

import threading
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from typing import Any

import torch
from torch import Tensor, nn

from torchckpt.errors import BudgetInfeasible, Fault, called, raise_fault
from torchckpt.layers.count import Counter
from torchckpt.layers.plan import LayersPlan, Option, frontier
from torchckpt.layers.took import Key, Took, key_at
from torchckpt.modules import is_compiled
from torchckpt.planning.budget import Budget, budget_bytes, enough, whole
from torchckpt.regions.core.checkpointing import refuse_transforms, run
from torchckpt.regions.core.frame import Frame, SavedTensors
from torchckpt.regions.core.options import Options
from torchckpt.regions.flags import thread
from torchckpt.regions.live import allocator_of
from torchckpt.regions.private import is_exporting, keep_from_dynamo
from torchckpt.regions.wrap.mixin import COMPILED
from torchckpt.tensors import tensors_in
from torchckpt.typing import Function

__all__ = ["Begin", "Enter", "Limit", "Steps"]

_CALLER = "checkpoint_layers"
_KNOWN = 64
"""So many steps of different shapes are remembered."""
_CALLS = 2_000
"""The most calls of a step that are told apart; further ones, in a loop that never frees all graphs, are recomputed."""
_AGAIN = 8
"""How often steps that begin like a known one, and went on otherwise, are counted."""
_LESS = 0.9
"""After the device was out of memory, the share of its budget that a plan may use."""
_NEAR = 1.01

_Shapes = tuple[Any, ...]


@dataclass(frozen=True)
class Limit:
    """What a step may take: ``budget``, or what is left of the whole ``device_memory``."""

    budget: Budget | None
    device_memory: Budget | None

    def bytes(self, everything: float, before: float) -> float:
        """The bytes above those ``before`` the step; ``everything`` is what it takes if all is kept."""
        if self.budget is not None:
            return float(budget_bytes(self.budget, int(everything)))
        return budget_bytes(self.device_memory or "", 0) - before


@dataclass
class _Known:
    """A step that is known, by its calls."""

    key: Key
    took: Took
    is_foretold: bool = False
    """Whether it was calculated from steps of two other sizes."""
    plan: LayersPlan | None = None
    before_bytes: float = 0.0
    """With a limit for the whole device, what was there when the plan was made."""
    scarce: float = 1.0
    """The share of the budget that a plan may use."""
    steps: int = 0
    """How many steps have followed the plan."""
    ooms: int = 0
    """How often the device had been out of memory when the plan was made."""
    communicates: bool = False
    """Whether calls have collectives in them."""

    @property
    def options(self) -> list[Option]:
        return frontier(self.took)


class _Mark:
    """What a call leaves at the node of its output."""

    __slots__ = ("__weakref__", "_note", "_step", "is_reached")

    def __init__(self, step: _Step, note: Callable[[], None] | None) -> None:
        self._step, self._note, self.is_reached = step, note, False

    def __call__(self, _: object) -> None:
        self._step.reached += not self.is_reached
        self.is_reached = True
        if self._note is not None:
            self._note()


@dataclass
class _Step:
    """The step that is running."""

    known: list[_Known]
    """The steps that it may be, by the calls so far."""
    device: torch.device
    counter: Counter | None = None
    is_learned: bool = False
    """Whether everything is recomputed and counted, to know the step."""
    key: list[_Shapes] = field(default_factory=list)
    model: _Shapes = ()
    """The shapes of what the model was called with, until the next call of a layer."""
    first: _Shapes = ()
    """What it was known by when it began."""
    marks: list[weakref.ref[_Mark]] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)
    marked: int = 0
    reached: int = 0
    """How many of the marks a backward has reached."""
    communicates: bool = False
    is_other: bool = False
    """Whether it began like a known step, and went on otherwise."""

    @property
    def is_alive(self) -> bool:
        """Whether a call waits for its backward."""
        while self.marks:
            mark = self.marks[-1]()
            if mark is not None and not mark.is_reached:
                return True
            self.marks.pop()
        return False

    @property
    def has_ended(self) -> bool:
        """Whether calls have waited for a backward, and none does now. Frozen layers in front do not wait."""
        return (self.marked > 0 or len(self.key) == _CALLS) and not self.is_alive

    def keeps(self, shapes: _Shapes) -> bool:
        """Whether the next call, with these shapes, is kept."""
        call, had = len(self.key), bool(self.known)
        self.known = [one for one in self.known if call < len(one.key) and one.key[call] == shapes]  # [3]
        self.is_other = self.is_other or (had and not self.known)
        self.key.append(shapes)
        return bool(self.known) and all(one.plan is not None and call in one.plan.kept for one in self.known)


class Steps:
    """The steps of one model, whose chosen layers call :meth:`run`."""

    def __init__(self, model: nn.Module, names: Sequence[str], limit: Limit) -> None:
        self._model, self._names, self._limit = weakref.ref(model), tuple(names), limit
        self._known: OrderedDict[Key, _Known] = OrderedDict()
        self._uncertain: dict[_Shapes, int] = {}
        """Of first calls after which other steps came than known ones, how often to count what comes."""
        self._step: _Step | None = None
        self._is_on, self._has_warned = True, False
        self.plan: LayersPlan | None = None
        """The plan that was followed last; None until one was made."""

    def remove(self) -> None:
        """From now on run nothing. Calls that wait for their backward are not changed."""
        self._is_on = False
        if self._step is not None and self._step.counter is not None:
            self._step.counter.stop()
        self._step = None

    def model_called(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a step, if none is running, before the model's own forward."""
        step = self._step
        if not self._is_on or not torch.is_grad_enabled() or not _is_alone():
            if step is not None and not step.is_alive:
                self._close()
            return
        shapes = f"training={model.training}", *_shapes((args, kwargs))
        if step is None or not step.key or not step.is_alive:
            step = self._begin((shapes,), _device_of(model, args, kwargs))
        step.model = shapes

    def run(
        self, layer: int, module: nn.Module, function: Function, args: Any, kwargs: Any, options: Options
    ) -> Any:
        """Run a call of a layer: as a region, or kept."""
        if not self._is_on or not torch.is_grad_enabled() or not _is_alone():
            return run(function, args, kwargs, options)
        step, tensors = self._step, (layer, f"training={module.training}", _shapes((args, kwargs)))
        if step is None or step.has_ended:
            step = self._begin(((), *tensors), _device_of(module, args, kwargs))
        if step.thread != threading.get_ident() or len(step.key) == _CALLS:
            return run(function, args, kwargs, options)
        shapes, step.model = (step.model, *tensors), ()
        call = len(step.key)
        if step.keeps(shapes):
            return self._kept(step, call, function, args, kwargs)
        return self._recomputed(step, call, module, function, args, kwargs, options)

    def _kept(self, step: _Step, call: int, function: Function, args: Any, kwargs: Any) -> Any:
        counter = step.counter
        with self._explained(step):
            if counter is None:
                outputs = function(*args, **kwargs)
            else:
                with counter.forward(call, (args, kwargs)):
                    outputs = function(*args, **kwargs)
        note = None if counter is None else lambda: counter.backward(call)
        return _marked(outputs, step, note)

    def _recomputed(
        self, step: _Step, call: int, module: nn.Module, function: Function, args: Any, kwargs: Any, options: Options
    ) -> Any:
        refuse_transforms()
        frame, counter = Frame(options), step.counter
        if step.is_learned:
            step.communicates |= any(hasattr(parameter, "device_mesh") for parameter in module.parameters())
        with self._explained(step):
            if counter is None:
                outputs = frame.forward(function, args, kwargs)
            else:
                frame.noted = counter.noted(call)
                with counter.forward(call, (args, kwargs)):
                    outputs = frame.forward(function, args, kwargs)
        frame.around = _Replaying(self, step, call)
        return _marked(outputs, step, None)

    # steps ----------------------------------------------------------------------------------------------------------

    def _begin(self, first: _Shapes, device: torch.device) -> _Step:
        """Begin a step whose first call has these shapes, or begins with them."""
        self._close()
        known = [one for one in self._known.values() if one.key[0][: len(first)] == first] or self._foretold(first)
        again = self._uncertain.get(first, 0)
        if known and not again:
            for one in known:
                self._plan(one, device)
                one.steps += 1
            self.plan = known[-1].plan
            is_shown = len(known) == 1 and known[0].steps == 2
            self._step = _Step(known, device, self._counter(device) if is_shown else None, first=first)
        else:
            if again:
                self._uncertain[first] = again - 1
            self._step = _Step([], device, self._counter(device), is_learned=True, first=first)  # [1]
        return self._step

    def _counter(self, device: torch.device) -> Counter | None:
        model = self._model()
        if model is None or device.type == "meta":
            return None
        looks = not any(is_compiled(module) or COMPILED in module.__dict__ for module in model.modules())
        return Counter(device, looks)

    def _close(self) -> None:
        """Learn from the step that has ended."""
        step, self._step = self._step, None
        if step is None:
            return
        if step.counter is not None:
            step.counter.stop()
        key = tuple(step.key)
        if 0 < step.reached < step.marked and any(_ooms(step.device) > one.ooms for one in step.known):
            self._ran_out(step)
        if step.is_other and key:
            self._uncertain.setdefault(step.first, _AGAIN)
        if step.counter is None or not step.counter.is_complete or not 0 < len(key) <= _CALLS:
            return
        if step.is_learned:
            if key not in self._known:
                self._uncertain.pop(step.first, None)
            communicates = step.communicates or step.counter.sees_collectives
            self._known[key] = _Known(key, step.counter.took(key), communicates=communicates)
            while len(self._known) > _KNOWN:
                self._known.popitem(last=False)
        elif len(step.known) == 1 and not step.is_other:
            self._measured(step.known[0], step.counter.peak_bytes)

    def _measured(self, known: _Known, peak_bytes: int) -> None:
        """Compare the planned peak with that of a step. A plan that exceeds its budget is made again."""
        if known.plan is None:
            return
        known.plan = replace(known.plan, measured_peak_bytes=float(peak_bytes))
        self.plan = known.plan
        if peak_bytes > _NEAR * known.plan.budget_bytes and known.plan.kept:
            known.scarce *= known.plan.budget_bytes / peak_bytes
            known.plan, known.steps = None, 0

    def _foretold(self, first: _Shapes) -> list[_Known]:
        """The step of a size of which two others are known, if bytes are linear in it."""
        counted = [one for one in self._known.values() if not one.is_foretold]
        for one, two in combinations(reversed(counted), 2):
            found = key_at(one.key, two.key, first)
            took = found and one.took.at(two.took, *found[1:])
            if found and took:
                known = self._known[found[0]] = _Known(found[0], took, is_foretold=True)
                return [known]
        return []

    def _plan(self, known: _Known, device: torch.device) -> None:
        """[2]"""
        self._known.move_to_end(known.key)
        before = self._before_bytes(device)
        if known.plan is not None and before <= _NEAR * known.before_bytes:
            return
        options = known.options
        limit = self._limit.bytes(peak_if_kept(known, self._names), before) * known.scarce
        fitting = [option for option in options if option[0] <= limit]
        if known.communicates:
            fitting = fitting[:1]
            self._warn_of_collectives()
        kept = (fitting or options[:1])[-1][2]
        calls = frozenset(call for call in range(len(known.key)) if kept >> call & 1)
        plan = LayersPlan(known.took, self._names, limit, calls)
        if not fitting and known.scarce == 1.0:
            raise self._too_small(plan, limit)
        known.plan, known.before_bytes, known.steps, known.ooms = plan, before, 0, _ooms(device)

    def _warn_of_collectives(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{_CALLER}: ranks communicate inside of the chosen layers, so every call is recomputed: a rank that "
                "keeps one would leave the others waiting",
                stacklevel=2,
            )

    def _before_bytes(self, device: torch.device) -> float:
        """With a limit for the whole device, what is allocated there."""
        if self._limit.device_memory is None:
            return 0.0
        allocator = allocator_of(device)
        if allocator is None:
            rule = "device_memory is given for a device that does not count what is allocated"
            with called(_CALLER):
                raise_fault(Fault(rule, str(device), 'budget="60GiB"'))
        return float(allocator.memory_allocated(device))

    def _too_small(self, plan: LayersPlan, limit: float) -> BudgetInfeasible:
        least = plan.peak_bytes
        name = "budget" if self._limit.budget is not None else "device_memory"
        needs = least if name == "budget" else least + (budget_bytes(self._limit.device_memory or "", 0) - limit)
        error = BudgetInfeasible(
            f"the budget is too small: a step takes {enough(least)} bytes even if it recomputes every chosen layer\n"
            f"  received: {whole(max(limit, 0.0))} bytes for it\n"
            f"  works:    {name}={enough(needs)} or more, more layers, or smaller batches",
            least,
            plan,
        )
        error.caller = _CALLER
        return error

    # out of memory --------------------------------------------------------------------------------------------------

    @contextmanager
    def _explained(self, step: _Step) -> Iterator[None]:
        """A context around a call or a replay. If the device is out of memory in it, the next plan takes less."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if f"\n{_CALLER}: " in str(error):
                raise
            raise torch.OutOfMemoryError(f"{error}\n{_CALLER}: {self._ran_out(step)}") from error

    def _ran_out(self, step: _Step) -> str:
        plans = [one.plan for one in step.known if one.plan is not None and one.plan.kept]
        if not plans:
            return "the step recomputes every chosen layer\n  works:    smaller batches, or more layers"
        for one in step.known:
            one.scarce, one.plan = one.scarce * _LESS, None
        less = min(plan.budget_bytes for plan in plans) * _LESS
        warnings.warn(
            f"{_CALLER}: the device was out of memory in a planned step, so the next plans take {_LESS:.0%} of theirs",
            stacklevel=2,
        )
        return f"a planned step takes more than the device has left\n  works:    budget={whole(less)} or less"


class _Replaying:
    """The context around the replay of one call."""

    def __init__(self, steps: Steps, step: _Step, call: int) -> None:
        self._steps, self._step, self._call = steps, step, call

    @contextmanager
    def __call__(self, recomputed: deque[SavedTensors]) -> Iterator[None]:
        counter = self._step.counter
        with self._steps._explained(self._step):
            if counter is None:
                yield
            else:
                with counter.replay(self._call, recomputed):
                    yield


def peak_if_kept(known: _Known, names: tuple[str, ...]) -> float:
    """The peak of a step that keeps everything."""
    return LayersPlan(known.took, names, 0.0, frozenset()).everything_kept_bytes


def _marked(outputs: Any, step: _Step, note: Callable[[], None] | None) -> Any:
    """``outputs``, with a mark at the node of the first that has one."""
    tensors = [outputs] if isinstance(outputs, Tensor) else tensors_in(outputs)
    node: Any = next((tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None), None)
    if node is not None:
        mark = _Mark(step, note)
        step.marked += 1
        node.register_prehook(mark)
        step.marks.append(weakref.ref(mark))
    return outputs


def _is_alone() -> bool:
    """Whether this thread is in no region, no schedule, and no trace."""
    return not (any(thread.flags[:2]) or thread.scope is not None or is_exporting())


def _shapes(tree: Any) -> _Shapes:
    return tuple((*tensor.shape, tensor.dtype, tensor.device) for tensor in tensors_in(tree))


def _device_of(module: nn.Module, *tree: Any) -> torch.device:
    """The device of a call: of its arguments, and else of its parameters; an accelerator before the CPU."""
    devices = [tensor.device for tensor in (*tensors_in(tree), *islice(module.parameters(), 1))]
    others = [device for device in devices if device.type != "cpu"]
    return (others or devices or [torch.device("cpu")])[0]


def _ooms(device: torch.device) -> int:
    """How often the device was out of memory, if it counts that."""
    allocator = allocator_of(device)
    return int(allocator.memory_stats(device).get("num_ooms", 0)) if hasattr(allocator, "memory_stats") else 0


class Enter:
    """What the calls of a chosen layer go to. A copy of the layer recomputes its calls."""

    def __init__(self, steps: Steps, layer: int) -> None:
        self._steps, self._layer = steps, layer

    def __call__(self, module: nn.Module, function: Function, args: Any, kwargs: Any, options: Options) -> Any:
        return self._steps.run(self._layer, module, function, args, kwargs, options)

    def __reduce__(self) -> Any:
        return _nothing, ()


class Begin:
    """The hook before the forward of the model. In a copy of the model it does nothing."""

    def __init__(self, steps: Steps | None = None) -> None:
        self._steps = steps

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if self._steps is not None:
            self._steps.model_called(model, args, kwargs)

    def __reduce__(self) -> Any:
        return Begin, ()


def _nothing() -> None:
    """What a copy of a layer has in place of its way in."""


keep_from_dynamo(Enter.__call__, Begin.__call__, _Mark.__call__)
