"""Step: the step of one model that is running: its calls, and what tells that they wait for their backward."""
from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchckpt.errors import BudgetInfeasible
from torchckpt.layers.count import Counter
from torchckpt.layers.known import CALLER, Foreseen, KnownStep, KnownSteps
from torchckpt.measuring.remembered import Shapes
from torchckpt.planning import Kind
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.options import Options
from torchckpt.regions.live import ooms_of
from torchckpt.regions.moved.order import Driven
from torchckpt.regions.moved.region import Moved
from torchckpt.regions.private import after_backward, keep_from_dynamo, running_node
from torchckpt.tensors import tensors_in
from torchckpt.typing import Function

__all__ = ["MOST_CALLS", "PLAIN", "Step"]

MOST_CALLS = 2_000
"""The most calls of a step that are told apart. Further ones are recomputed, until the newest of them has ended: a loop
may hold a graph for ever."""
PLAIN = nullcontext()
_MOST_REACHED = 4 * MOST_CALLS
"""So many times that a backward reaches a mark tell one step from another."""


class Mark:
    """What a call leaves at the nodes of its outputs."""

    __slots__ = ("__weakref__", "_call", "_is_kept", "_step", "is_reached")

    def __init__(self, step: Step, call: int, is_kept: bool) -> None:
        self._step, self._call, self._is_kept, self.is_reached = step, call, is_kept, False

    def __call__(self, _: object) -> None:
        is_first = not self._step.order
        if not (self._step.is_in_backward or torch.compiler.is_dynamo_compiling()):  # for compiled autograd
            self._step.is_in_backward = True
            after_backward(self._step.backward_ended)
        if len(self._step.order) < _MOST_REACHED:
            self._step.order.append((self._step.calls, self._call))
        self._step.reached += not self.is_reached
        self.is_reached = True
        if is_first:
            self._step.turns_back()
        self._step.goes_back(self._call, self._is_kept)


@dataclass
class Step:
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
    every: KnownSteps
    """All that are known of the model."""
    began: Sequence[KnownStep] = field(init=False)
    """Those that it might be when it began."""
    key: list[Shapes] = field(default_factory=list)
    """The calls that were looked at in full."""
    calls: int = 0
    """How many calls there were."""
    model: Shapes = ()
    """What the model was called with, until the next call of a layer."""
    marks: list[weakref.ref[Mark]] = field(default_factory=list)
    newest: Callable[[], Mark | None] = lambda: None
    marked: int = 0
    reached: int = 0
    """How many of the marks a backward has reached."""
    order: list[tuple[int, int]] = field(default_factory=list)
    """Each time that a backward reached a mark: how many calls there had been, and the number of the mark's call."""
    hides: bool = False
    """Whether a call takes or returns an object whose tensors are not seen."""
    is_in_kept: bool = False
    """Whether a call that is kept runs now. A call inside of it is a part of it."""
    has_raised: bool = False
    """Whether a call or a replay has raised an error."""
    is_in_backward: bool = False
    """Whether a backward that has reached a mark has not ended. One that raises an error never does."""
    is_other: bool = False
    """Whether it began like a known step, and went on otherwise."""
    script: Sequence[Foreseen | None] = ()
    """What is foreseen of the calls, if that is clear."""
    thread: int = field(default_factory=threading.get_ident)
    driven: Driven | None = None
    """What calls that are away follow."""
    ooms: int = field(init=False)
    """How often the device had been out of memory when it began, or when its last backward ended, or failed."""

    def __post_init__(self) -> None:
        self.began, self.ooms = self.known, ooms_of(self.device)

    @property
    def is_own(self) -> bool:
        """Whether it is of this thread."""
        return self.thread == threading.get_ident()

    @property
    def has_run_out(self) -> bool:
        """Whether the device was out of memory since it began, wherever; not where a backward has ended in spite of it,
        as cuDNN goes on with another kernel, and not where it was said."""
        return ooms_of(self.device) > self.ooms

    @property
    def has_failed(self) -> bool:
        """Whether a call, a replay or a backward has raised an error, which may keep the graph alive for as long as it
        is shown."""
        is_cut = self.is_in_backward and self.is_own and running_node() is None
        return self.has_raised or is_cut

    @property
    def is_alive(self) -> bool:
        """Whether a call waits for its backward; after very many calls, whether the newest one does."""
        while self.marks and not self.has_failed:
            mark = self.marks[-1]()
            if mark is not None and not mark.is_reached:
                return self.reached == 0 or self.calls < MOST_CALLS or mark is self.newest()
            self.marks.pop()
        return False

    @property
    def has_ended(self) -> bool:
        """Whether calls have waited for a backward, and none does now. Frozen layers in front do not wait."""
        return self.has_failed or ((self.marked > 0 or self.calls == MOST_CALLS) and not self.is_alive)

    @property
    def is_unknown(self) -> bool:
        """Whether it was taken for a known step, and was none of them: it went on otherwise, or its backward came
        earlier, or in an order that was not counted."""
        if self.has_failed or not self.order:
            return self.is_other
        ran = self.ran
        return self.is_other or (bool(self.known) if ran is None else ran.is_otherwise(self.calls, tuple(self.order)))

    def keeps(self, shapes: Shapes) -> bool:
        """Whether the next call, with these shapes, is kept, here or on the host."""
        call, had = self.calls, bool(self.known)
        self.known = [step for step in self.known if call < len(step.key) and step.key[call] == shapes]  # [3]
        self.is_other |= had and not self.known
        if self.agreed is None:
            self.checked(self.known)
        is_clear = len(self.known) == 1 and self.counter is None
        self.script = self.known[0].script if is_clear else ()
        self.key.append(shapes)
        self.calls += 1
        if self.agreed is not None:
            return call in self.agreed
        if self.sends(call):
            return True
        fit = [step.plan for step in self.known if not step.exceeds]  # others are an error where it is none of these
        return bool(fit) and all(plan is not None and call in plan.kept for plan in fit)

    @property
    def ran(self) -> KnownStep | None:
        """The known step that it is, if no further call comes."""
        return next((step for step in self.known if len(step.key) == self.calls), None)

    def sends(self, call: int) -> bool:
        """Whether ``call``, which begins, goes to the host: if it is clear which step it is."""
        plan = self.known[0].plan if self.known and self.driven is not None else None
        return plan is not None and call in plan.sent

    def run(self, call: int, is_kept: bool, function: Function, args: Any, kwargs: Any, options: Options) -> Any:
        """Run a call: as a region, or not; then it is kept, or goes to the host."""
        self.is_in_kept = is_kept
        try:
            if is_kept:
                if self.driven is None or not self.sends(call):
                    return function(*args, **kwargs)
                return self.sent(call, self.driven, function, args, kwargs)
            frame = Frame(options)
            if self.counter is not None:
                frame.note = partial(self.counter.note, call)
            outputs = frame.forward(function, args, kwargs)
            frame.note = None  # the graph holds the frame for as long as the loop likes
            frame.around = partial(self.replaying, call)
            return outputs
        except BaseException as error:
            self.failed(error)
            raise
        finally:
            self.is_in_kept = False

    def sent(self, call: int, driven: Driven, function: Function, args: Any, kwargs: Any) -> Any:
        """Run a call that goes to the host, as a region that moves."""
        with driven.entered():
            moved = Moved(is_inner=True)
            driven.moves(call, moved)
            outputs = moved.forward(function, args, kwargs)
        moved.send()
        return outputs

    def checked(self, known: Sequence[KnownStep]) -> None:
        """Raise the error of a step that is one of these ``known`` ones, if none of them fits."""
        try:
            self.every.check(known)
        except BudgetInfeasible as error:
            self.failed(error)
            raise

    def turns_back(self) -> None:
        """The first backward begins, which shows that the step is none of those that are longer."""
        if self.agreed is None:
            self.checked([step for step in self.known if step.turns_at(self.calls)])

    def backward_ended(self) -> None:
        """A backward has ended without an error."""
        self.is_in_backward, self.ooms = False, ooms_of(self.device)

    def goes_back(self, call: int, is_kept: bool) -> None:
        """A backward reaches ``call``."""
        if self.driven is not None:
            self.driven.reaches((Kind.FORWARD, self.calls))  # where the last ones leave
            self.driven.reaches((Kind.BACKWARD, call))
        if self.counter is not None and not torch.compiler.is_dynamo_compiling():  # else nothing is known of it
            self.counter.backward(call, is_kept)

    def marked_with(self, outputs: Any, call: int, is_kept: bool) -> Any:
        """``outputs``, with the mark of ``call`` at their nodes: any of them may be what the loss depends on."""
        tensors = [outputs] if isinstance(outputs, Tensor) else tensors_in(outputs)
        nodes: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        if nodes:
            mark = Mark(self, call, is_kept)
            for node in dict.fromkeys(nodes):
                node.register_prehook(mark)
            self.newest = weakref.ref(mark)
            self.marks.append(self.newest)
            self.marked += 1
        return outputs

    def uncounted(self) -> Counter | None:
        """Count no more. Returns what has counted; nothing holds it then, for how long the graph may be held."""
        counter, self.counter = self.counter, None
        if counter is not None:
            counter.stop()
        return counter

    def failed(self, error: BaseException) -> None:
        """Note that a call or a replay has raised ``error``. Where memory ran out, raise one that says what to do."""
        self.has_raised, self.script = True, ()
        if isinstance(error, torch.OutOfMemoryError):
            self.ooms = ooms_of(self.device)
            raise torch.OutOfMemoryError(f"{error}\n{CALLER}: {self.every.ran_out(self.known)}") from error

    @contextmanager
    def replaying(self, call: int, frame: Frame) -> Iterator[None]:
        """A context around the replay of a call, which fills ``frame.recomputed``."""
        try:
            with PLAIN if self.counter is None else self.counter.replay(call, frame):
                yield
        except BaseException as error:
            self.failed(error)
            raise


keep_from_dynamo(Mark.__call__, Step.backward_ended)
