"""Follow: at each call of a chosen layer, which step it is of, and whether the call is kept.

Nobody says where a step begins. It begins where no call of the one before waits for its backward any more: each call
leaves a mark at the nodes of its outputs, which the backward reaches, or which are freed with the graph.

[1] A step whose first call is of no known step recomputes everything, and is counted. [2] Of others the plans are made
when they begin. [3] While calls are those of known steps, a call is kept if all of these keep it; any other call is
recomputed. [4] Of calls between the first and the last one of a known step, only the layer and the shape of the first
tensor are looked at.
"""
from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torchckpt.layers.count import Counter
from torchckpt.layers.known import Foreseen, KnownStep, KnownSteps, has_run_out, measured, ran_out
from torchckpt.layers.plan import LayersPlan, Wish
from torchckpt.measuring.known import SHOWN
from torchckpt.measuring.shapes import Settings, Shapes, shapes_of
from torchckpt.modules import is_compiled
from torchckpt.regions.core.checkpointing import refuse_transforms, run
from torchckpt.regions.core.frame import Frame, SavedTensors
from torchckpt.regions.core.options import Options
from torchckpt.regions.flags import thread
from torchckpt.regions.private import hooks_in_force, is_exporting, keep_from_dynamo, running_node
from torchckpt.regions.wrap.mixin import COMPILED
from torchckpt.tensors import hides_tensors, tensors_in
from torchckpt.typing import Function

__all__ = ["Begin", "Enter", "Steps"]

_CALLER = "checkpoint_layers"
_CALLS = 2_000
"""The most calls of a step that are told apart. Further ones are recomputed, until the newest of them has ended: a loop
may hold a graph for ever."""
_AGAIN = 8
"""Where a step began like a known one and went on otherwise, so many such steps are counted."""
_HIDES = (
    "chosen layers take or return objects whose tensors are not seen, so every call is recomputed: have them take "
    "tensors, lists, tuples or dicts, or register the class with torch.utils._pytree"
)
_UNSEEN = 2
_NOT_SEEN = (
    "no call of a chosen layer was seen in the model's last calls, so there is no plan: compile its layers and not the "
    "whole model, or use graph.backend(budget=...); have no other regions around the layers"
)

_PLAIN = nullcontext()


class _Mark:
    """What a call leaves at the nodes of its outputs."""

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

    first: Shapes
    """The first shapes that were seen; known steps are looked up by them."""
    device: torch.device
    known: list[KnownStep]
    """The steps that it may be, by the calls so far."""
    counter: Counter | None
    is_learned: bool
    """Whether everything is recomputed and counted, to know the step."""
    has_gradients: bool
    """Whether there were gradients before it."""
    agreed: frozenset[int] | None
    """The calls that all ranks keep; None where each keeps its own."""
    key: list[Shapes] = field(default_factory=list)
    """The calls that were looked at in full."""
    calls: int = 0
    """How many calls there were."""
    model: Shapes = ()
    """What the model was called with, until the next call of a layer."""
    marks: list[weakref.ref[_Mark]] = field(default_factory=list)
    newest: Callable[[], _Mark | None] = lambda: None
    marked: int = 0
    reached: int = 0
    """How many of the marks a backward has reached."""
    hides: bool = False
    """Whether a call takes or returns an object whose tensors are not seen."""
    is_in_kept: bool = False
    """Whether a call that is kept runs now. A call inside of it is a part of it."""
    has_failed: bool = False
    """Whether a call or a replay has raised an error, which may keep the graph alive for as long as it is shown."""
    is_other: bool = False
    """Whether it began like a known step, and went on otherwise."""
    script: Sequence[Foreseen | None] = ()
    """What is foreseen of the calls, if that is clear."""
    thread: int = field(default_factory=threading.get_ident)

    @property
    def is_alive(self) -> bool:
        """Whether a call waits for its backward; after very many calls, whether the newest one does."""
        while self.marks and not self.has_failed:
            mark = self.marks[-1]()
            if mark is not None and not mark.is_reached:
                return self.reached == 0 or self.calls < _CALLS or mark is self.newest()
            self.marks.pop()
        return False

    @property
    def has_ended(self) -> bool:
        """Whether calls have waited for a backward, and none does now. Frozen layers in front do not wait."""
        return self.has_failed or ((self.marked > 0 or self.calls == _CALLS) and not self.is_alive)

    def keeps(self, shapes: Shapes) -> bool:
        """Whether the next call, with these shapes, is kept."""
        call, had = self.calls, bool(self.known)
        self.known = [step for step in self.known if call < len(step.key) and step.key[call] == shapes]  # [3]
        self.is_other |= had and not self.known
        self.script = self.known[0].script if len(self.known) == 1 and self.counter is None else ()
        self.key.append(shapes)
        self.calls += 1
        if self.agreed is not None:
            return call in self.agreed
        return bool(self.known) and all(step.plan is not None and call in step.plan.kept for step in self.known)

    def run(self, call: int, is_kept: bool, function: Function, args: Any, kwargs: Any, options: Options) -> Any:
        """Run a call: kept, or as a region."""
        self.is_in_kept = is_kept
        try:
            if is_kept:
                return function(*args, **kwargs)
            frame = Frame(options)
            if self.counter is not None:
                frame.noted = self.counter.noted(call)
            outputs = frame.forward(function, args, kwargs)
            frame.around = partial(self.replaying, call)
            return outputs
        except BaseException as error:
            self.failed(error)
            raise
        finally:
            self.is_in_kept = False

    def marked_with(self, outputs: Any, note: Callable[[], None] | None) -> Any:
        """``outputs``, with a mark at their nodes: any of them may be what the loss depends on."""
        tensors = [outputs] if isinstance(outputs, Tensor) else tensors_in(outputs)
        nodes: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        if nodes:
            mark = _Mark(self, note)
            for node in dict.fromkeys(nodes):
                node.register_prehook(mark)
            self.newest = weakref.ref(mark)
            self.marks.append(self.newest)
            self.marked += 1
        return outputs

    def failed(self, error: BaseException) -> None:
        """Note that a call or a replay has raised ``error``. Where memory ran out, raise one that says what to do."""
        self.has_failed = True
        if isinstance(error, torch.OutOfMemoryError):
            raise torch.OutOfMemoryError(f"{error}\n{_CALLER}: {ran_out(self.known)}") from error

    @contextmanager
    def replaying(self, call: int, recomputed: deque[SavedTensors]) -> Iterator[None]:
        """A context around the replay of a call, which fills ``recomputed``."""
        try:
            with _PLAIN if self.counter is None else self.counter.replay(call, recomputed):
                yield
        except BaseException as error:
            self.failed(error)
            raise


class Steps:
    """The steps of one model, whose chosen layers call :meth:`run`."""

    def __init__(self, model: nn.Module, known: KnownSteps) -> None:
        self._model, self._known = weakref.ref(model), known
        self._settings = Settings(model)
        self._uncertain: dict[Shapes, int] = {}
        """By what steps begin with that may be others than known ones: how often to count what comes."""
        self.step: _Step | None = None
        """The step that is running."""
        self._groups: set[Any] = set()
        """The process groups in which ranks communicate inside of layers."""
        self._agreement: Any = None
        self._is_on = True
        self._unseen = 0
        """How many calls of the model one after the other had no call of a chosen layer."""
        self._followed: KnownStep | None = None

    @property
    def plan(self) -> LayersPlan | None:
        """The plan that was followed last; None until one was made."""
        return None if self._followed is None else self._followed.plan

    def remove(self) -> None:
        """From now on run nothing. Calls that wait for their backward are not changed."""
        self._is_on = False
        if self.step is not None and self.step.counter is not None:
            self.step.counter.stop()
        self.step = None

    def model_called(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Before the model's own forward: begin a step, if none is running."""
        step = self.step
        if not self._is_on or not torch.is_grad_enabled() or not _is_alone():
            if step is not None and not step.is_alive:
                self._close()
            return
        device = _device_of(model, args, kwargs)
        shapes = (*self._settings.now(device.type), *shapes_of(*args, *kwargs.values()))
        if step is None or not step.calls or not step.is_alive:
            self._unseen = 0 if step is None or step.calls else self._unseen + 1
            if self._unseen == _UNSEEN:
                warnings.warn(f"{_CALLER}: {_NOT_SEEN}", stacklevel=3)
            step = self._begin((shapes,), device)
        step.model = shapes

    def run(self, layer: int, module: nn.Module, function: Function, args: Any, kwargs: Any, options: Options) -> Any:
        """Run a call of a layer: as a region, or kept."""
        if not self._is_on or not torch.is_grad_enabled() or not _is_alone() or running_node() is not None:
            return run(function, args, kwargs, options)  # a region of torch calls it in a backward, which is no step
        step, own = self.step, (layer, f"training={module.training}", shapes_of(*args, *kwargs.values()))
        if step is None or step.has_ended:
            device = _device_of(module, args, kwargs)
            settings = self._settings.now(device.type)
            step = self._begin((settings, *own), device)
            step.model = settings
        if step.thread != threading.get_ident() or step.calls == _CALLS:
            return run(function, args, kwargs, options)
        if step.is_in_kept:
            return function(*args, **kwargs)
        refuse_transforms()
        shapes, step.model = (step.model, *own), ()
        call, counter, is_kept = step.calls, step.counter, step.keeps(shapes)
        note = partial(counter.backward, call) if counter is not None and is_kept else None
        with _PLAIN if counter is None else counter.forward(call, (args, kwargs)):
            outputs = step.run(call, is_kept, function, args, kwargs, options)
        step.hides |= step.is_learned and any(map(hides_tensors, tree_leaves((args, kwargs, outputs))))
        return step.marked_with(outputs, note)

    def _begin(self, first: Shapes, device: torch.device) -> _Step:
        """Begin a step whose first call has these shapes, or begins with them."""
        self._close()
        again = self._uncertain.get(first, 0)
        known = [] if again else self._known.beginning(first, device, self._settings)
        is_learned = not known  # [1]
        if again:
            self._uncertain[first] = again - 1
        agreed = self._known.plan(known, self._agreed(device))  # [2]
        if known:
            self._followed = known[-1]
        is_counted = is_learned or (len(known) == 1 and known[0].steps == SHOWN)
        counter = self._counter(device) if is_counted else None
        has_gradients = is_learned and self._settings.has_gradients
        self.step = _Step(first, device, known, counter, is_learned, has_gradients, agreed)
        return self.step

    def _agreed(self, device: torch.device) -> Callable[[Wish | None], frozenset[int]] | None:
        """What agrees with other ranks; None where none communicates inside of layers."""
        if self._groups and self._agreement is None:
            from torchckpt.layers.agree import Agreement  # which not every build of torch can import

            self._agreement = Agreement(self._groups, device, self._known)
        return None if self._agreement is None else self._agreement.kept

    def _counter(self, device: torch.device) -> Counter | None:
        model = self._model()
        if model is None or device.type == "meta":
            return None
        looks = not any(is_compiled(module) or COMPILED in module.__dict__ for module in model.modules())
        return Counter(device, looks, model, self._settings.gathered)

    def _close(self) -> None:
        """Learn from the step that has ended."""
        step, self.step = self.step, None
        if step is None:
            return
        if 0 < step.reached < step.marked and has_run_out(step.known, step.device):
            ran_out(step.known)
        if step.is_other:
            self._uncertain.setdefault(step.first, _AGAIN)
        if step.counter is None:
            return
        step.counter.stop()
        if not step.counter.groups <= self._groups:
            self._groups, self._agreement = self._groups | step.counter.groups, None
        if not step.counter.is_complete or not 0 < step.calls < _CALLS:
            return
        if not step.is_learned:
            for known in step.known:
                measured(known, step.counter.peak_bytes)
        elif self._known.learn(tuple(step.key), step.counter, _HIDES * step.hides, step.has_gradients):
            self._uncertain.pop(step.first, None)


def _is_alone() -> bool:
    """Whether this thread is in no region, also of torch, no schedule, and no trace."""
    hooks = hooks_in_force(True)
    is_in_torch = hooks is not None and getattr(hooks[0], "__module__", None) == torch.utils.checkpoint.__name__
    return not (any(thread.flags[:2]) or is_in_torch or thread.scope is not None or is_exporting())


def _device_of(module: nn.Module, *tree: Any) -> torch.device:
    """The device of a call: of its arguments, and else of its parameters; an accelerator before the CPU."""
    devices = [tensor.device for tensor in (*tensors_in(tree), *islice(module.parameters(), 1))]
    others = [device for device in devices if device.type != "cpu"]
    return (others or devices or [torch.device("cpu")])[0]


class Enter:
    """What the calls of a chosen layer go to. A copy of the layer recomputes its calls."""

    def __init__(self, steps: Steps, layer: int) -> None:
        self._steps, self._layer = steps, layer

    def __call__(self, module: nn.Module, function: Function, args: Any, kwargs: Any, options: Options) -> Any:
        step = self._steps.step
        foreseen = step.script[step.calls] if step is not None and step.calls < len(step.script) else None
        if (
            step is None or foreseen is None or foreseen.layer != self._layer or step.is_in_kept
            or not args or getattr(args[0], "shape", None) != foreseen.shape
            or step.thread != threading.get_ident() or not torch.is_grad_enabled()
            or hooks_in_force(True) is not None or running_node() is not None  # in a region, or in a replay
        ):  # fmt: skip
            return self._steps.run(self._layer, module, function, args, kwargs, options)
        step.calls += 1
        return step.run(step.calls - 1, foreseen.is_kept, function, args, kwargs, options)  # [4]

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
