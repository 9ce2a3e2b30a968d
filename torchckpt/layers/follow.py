"""Follow: at each call of a chosen layer, which step it is of, and whether the call is kept.

Nobody says where a step begins. It begins where no call of the one before waits for its backward any more: each call
leaves a mark at the nodes of its outputs, which the backward reaches, or which are freed with the graph.

[1] A step whose first call is of no known step recomputes everything, and is counted. [2] Of others the plans are made
when they begin. [3] While calls are those of known steps, a call is kept if all of these keep it; any other call is
recomputed. [4] Of calls between the first and the last one of a known step, only the layer and the shape of the first
tensor are looked at. They leave no mark while the newest one waits: without it, as behind frozen layers, behind a graph
that was cut, and where an output was dropped, nobody would know that the step goes on. Where a step was taken for ended
before its last call nevertheless, all calls leave one from then on. [5] An error may hold the graph of the step in
which memory ran out, as in a notebook. Ranks that communicate inside of layers begin their steps together.
"""
from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._pytree import tree_leaves

from torchckpt.layers.count import Counter
from torchckpt.layers.known import CALLER, KnownStep, KnownSteps, measured
from torchckpt.layers.plan import LayersPlan, Wish
from torchckpt.layers.step import MOST_CALLS, PLAIN, Step
from torchckpt.measuring.remembered import SHOWN, Discarded, ModelSettings, Shapes, shapes_of
from torchckpt.planning import Kind
from torchckpt.regions.core.checkpointing import refuse_transforms, run
from torchckpt.regions.core.options import Options
from torchckpt.regions.flags import local
from torchckpt.regions.moved.order import Driven
from torchckpt.regions.private import hooks_in_force, is_exporting, keep_from_dynamo, leave_modes, running_node
from torchckpt.regions.wrap.mixin import are_compiled
from torchckpt.tensors import hides_tensors, tensors_in
from torchckpt.typing import Function

__all__ = ["Begin", "Enter", "Steps"]

_AGAIN, _MOST_AGAIN = 8, 256
"""After a step that was taken for a known one and was another, the next steps that begin alike are counted: the first
number of them, and one more for each step that had followed the plans, at most the second number more."""
_MOST_ROUNDS = 8
"""How often that is done where nothing is learned of it."""
_HIDES = (
    "chosen layers take or return objects whose tensors are not seen, so every call is recomputed: have them take "
    "tensors, lists, tuples or dicts, or register the class with torch.utils._pytree"
)
_ON_META = (
    "the step is on meta, where nothing takes bytes, so there is no plan and every call is recomputed: move the model "
    "to a device first"
)
_ON_OTHERS = (
    "the model is on several accelerators, and the budget is of the one that a step uses first: nothing counts or "
    "limits what others take; Pipe(module, budget=...) has a budget for each device"
)
_UNSEEN = 2
_NOT_SEEN = (
    "no call of a chosen layer was seen in the model's last calls, so there is no plan: compile its layers and not the "
    "whole model, before this call or by layer.compile(), or use graph.backend(budget=...); have no other regions "
    "around the layers"
)


@dataclass
class _Uncertain:
    """What begins like known steps, and may be another."""

    left: int = 0
    """How many of the next ones are counted."""
    rounds: int = 0
    """How often it was said that they are."""

    def count_again(self, passed: int) -> None:
        """Count the next ones, after so many that have ``passed``."""
        if self.rounds < _MOST_ROUNDS:
            self.left, self.rounds = _AGAIN + min(passed, _MOST_AGAIN), self.rounds + 1

    def is_again(self) -> bool:
        """Whether the one that begins is counted."""
        self.left -= 1
        return self.left >= 0


class Steps:
    """The steps of one model, whose chosen layers call :meth:`run`."""

    def __init__(self, model: nn.Module, known: KnownSteps) -> None:
        self._model, self._known = weakref.ref(model), known
        self._settings = ModelSettings(model)
        self._discarded = Discarded()
        self._uncertain: dict[Shapes, _Uncertain] = {}
        """By what steps begin with that may be others than known ones."""
        self.step: Step | None = None
        """The step that is running."""
        self._is_rest = False
        """Whether it may be the rest of one that was taken for ended before its last call."""
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
        followed = (self.step and self.step.ran) or self._followed
        return None if followed is None else followed.plan

    def __reduce__(self) -> Any:
        return _nothing, ()  # a copy of the model has no steps: its calls are regions

    def remove(self) -> None:
        """From now on run nothing. Calls that wait for their backward are not changed."""
        self._is_on = False
        if self.step is not None:
            self.step.uncounted()
        self.step = None

    def model_called(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Before the model's own forward: begin a step, if none is running."""
        step = self.step
        if not self._is_on or not torch.is_grad_enabled() or not _is_alone():
            if step is not None and step.is_own and not step.is_alive:
                self._close()
            return
        device = _device_of(model, args, kwargs)
        shapes = (*self._settings_on(device), *shapes_of(*args, **kwargs))
        if step is None or not step.calls or not step.is_alive or (step.has_run_out and not self._groups):  # [5]
            self._unseen = 0 if step is None or step.calls else self._unseen + 1
            if self._unseen == _UNSEEN:
                warnings.warn(f"{CALLER}: {_NOT_SEEN}", stacklevel=3)
            step = self._begin((shapes,), device, (args, kwargs))
        step.model = shapes

    def run(self, layer: int, module: nn.Module, function: Function, args: Any, kwargs: Any, options: Options) -> Any:
        """Run a call of a layer: as a region, or kept."""
        if not self._is_on or not torch.is_grad_enabled() or not _is_alone() or running_node() is not None:
            return run(function, args, kwargs, options)  # a region of torch calls it in a backward, which is no step
        step, own = self.step, (layer, f"training={module.training}", shapes_of(*args, **kwargs))
        if step is None or step.has_ended:
            device = _device_of(module, args, kwargs)
            settings = self._settings_on(device)
            step = self._begin((settings, *own), device, (args, kwargs))
            step.model = settings
        if not step.is_own or step.calls == MOST_CALLS:
            return run(function, args, kwargs, options)
        if step.is_in_kept:
            return function(*args, **kwargs)
        refuse_transforms()
        shapes, step.model = (step.model, *own), ()
        call, counter, is_kept = step.calls, step.counter, step.keeps(shapes)
        if step.driven is not None:
            step.driven.reaches((Kind.FORWARD, call))
        with PLAIN if counter is None else counter.forward(call, (args, kwargs)):
            outputs = step.run(call, is_kept, function, args, kwargs, options)
        if step.is_learned and counter is not None:
            counter.stay(call, outputs)
        step.hides |= step.is_learned and any(map(hides_tensors, tree_leaves((args, kwargs, outputs))))
        return step.marked_with(outputs, call, is_kept)

    def _settings_on(self, device: torch.device) -> Shapes:
        settings = self._settings.now(device.type)
        return (*settings, self._settings.has_gradients) if self._known.tells_gradients else settings

    def _begin(self, first: Shapes, device: torch.device, inputs: Any) -> Step:
        """Begin a step whose first call has these shapes, or begins with them, and is given ``inputs``."""
        self._close()
        leave_modes()  # an evaluation in inference mode could not
        uncertain = self._uncertain.get(first)
        is_again = uncertain is not None and uncertain.is_again()
        known = [] if is_again else self._known.beginning(first, device, self._settings)
        is_learned = not known  # [1]
        agreed = self._known.plan(known, self._agreed(device))  # [2]
        if known and not any(step is self._followed for step in known):
            self._followed = known[-1]  # until it is clear which one it is
        shown = 1 if known and known[0].is_foretold else SHOWN
        is_counted = is_learned or (len(known) == 1 and known[0].steps + 1 == shown)
        counter = self._counter(device, inputs) if is_counted else None
        has_gradients = is_learned and self._settings.has_gradients
        self.step = Step(first, device, known, counter, is_learned, has_gradients, agreed, self._known)
        plan = known[0].plan if len(known) == 1 else None
        if plan is not None and plan.away:
            self.step.driven = Driven(
                move
                for call, release, issue in reversed(plan.away)
                for move in (((Kind.FORWARD, release), call, False), ((Kind.BACKWARD, issue), call, True))
            )
        return self.step

    def _agreed(self, device: torch.device) -> Callable[[Wish | None], frozenset[int]] | None:
        """What agrees with other ranks; None where none communicates inside of layers."""
        if self._groups and self._agreement is None:
            from torchckpt.layers.agree import Agreement  # which not every build of torch can import

            self._agreement = Agreement(self._groups, device, self._known)
        return None if self._agreement is None else self._agreement.kept

    def _counter(self, device: torch.device, inputs: Any) -> Counter | None:
        model = self._model()
        if device.type == "meta":
            self._known.warn(_ON_META)
            return None
        if model is None:
            return None
        if any(weight.device.type == device.type and weight.device != device for weight in model.parameters()):
            self._known.warn(_ON_OTHERS)
        looks = not are_compiled(model.modules())
        return Counter(device, looks, model, inputs, self._settings.gathered)

    def _close(self) -> None:
        """Learn from the step that has ended."""
        step, self.step = self.step, None
        if step is None:
            return
        if step.has_run_out:  # outside of the chosen layers, or in the backward of a kept call
            step.has_raised = True
            self._known.ran_out(step.known, is_shown=False)
        is_rest, self._is_rest = self._is_rest, False
        if step.is_unknown and not is_rest:
            self._uncertain.setdefault(step.first, _Uncertain()).count_again(sum(known.steps for known in step.began))
        order, ran = tuple(step.order), step.ran
        for known in step.known if not (order or step.has_failed) else ():
            self._is_rest |= known.ended_early(step.calls)
        if ran is not None:
            self._followed, ran.steps = ran, ran.steps + (not step.has_failed)
        counter = step.uncounted()
        if counter is None:
            return
        if not counter.groups <= self._groups:
            self._groups, self._agreement = self._groups | counter.groups, None
        if not counter.is_complete or not 0 < step.calls < MOST_CALLS:
            return
        if self._discarded.discards(tuple(step.key), [counter.peak_bytes], [counter.lost_bytes]):
            if ran is not None:
                ran.steps -= 1  # so that the next one is counted
            return
        if not step.is_learned:
            if ran is not None:
                measured(ran, counter.peak_bytes)
        elif self._known.learn(tuple(step.key), order, counter, _HIDES * step.hides, step.has_gradients):
            self._uncertain.pop(step.first, None)


def _is_alone() -> bool:
    """Whether this thread is in no region, also of torch, no schedule, and no trace."""
    hooks = hooks_in_force(True)
    is_in_torch = hooks is not None and getattr(hooks[0], "__module__", None) == torch.utils.checkpoint.__name__
    return not (any(local.thread.flags[:2]) or is_in_torch or local.thread.scope is not None or is_exporting())


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
        step, foreseen = self._steps.step, None
        if step is not None and step.thread == threading.get_ident() and step.calls < len(step.script):
            foreseen = step.script[step.calls]  # that of another thread goes on meanwhile
        if (
            step is None or foreseen is None or foreseen.layer != self._layer or step.is_in_kept
            or not args or getattr(args[0], "shape", None) != foreseen.shape
            or not torch.is_grad_enabled()
            or hooks_in_force(True) is not None or running_node() is not None  # in a region, or in a replay
        ):  # fmt: skip
            return self._steps.run(self._layer, module, function, args, kwargs, options)
        step.calls += 1
        outputs = step.run(call := step.calls - 1, foreseen.is_kept, function, args, kwargs, options)  # [4]
        mark = step.newest()
        if mark is None or mark.is_reached:
            return step.marked_with(outputs, call, foreseen.is_kept)
        return outputs

    def __reduce__(self) -> Any:
        return _nothing, ()


class Begin:
    """The hook before the forward of the model. In a copy of the model it does nothing."""

    def __init__(self, steps: Steps | None = None) -> None:
        self.steps = steps

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if self.steps is not None:
            self.steps.model_called(model, args, kwargs)

    def __reduce__(self) -> Any:
        return Begin, ()


def _nothing() -> None:
    """What a copy of a model has in place of its steps, and a copy of a layer in place of its way in."""


keep_from_dynamo(Enter.__call__, Begin.__call__)
