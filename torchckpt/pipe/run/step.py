"""Step: forward and backward of a mini-batch in 1F1B order, with a separate autograd graph for each stage.

``loss.backward()`` through one graph can start only after all forwards, so every stage keeps all m micro-batches. Here
the graph is cut between the stages, and stage j of p keeps only p - j micro-batches:

    leaf(i, j) ─► region(i, j) ─► output(i, j)  ┄ detached, copied ┄►  leaf(i, j+1) ─► ...

    F   stage j runs on leaf(i, j), a copy of the output of stage j - 1 that requires grad
    R   its frame is recomputed, one micro-batch ahead of its backward
    B   output(i, j) goes back with leaf(i, j+1).grad, copied; likewise the skips that left stage j

The order is that of ``one_f_one_b`` in ``torchckpt.planning``. One thread launches all actions, in the order in which
they would start if a backward took twice as long as a forward, and a recompute no time. On accelerators the launched
work runs asynchronously; stages wait for each other through their streams.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.profiler import record_function
from torch.utils import _pytree as pytree

from torchckpt.errors import Fault, check
from torchckpt.pipe.in_place import Memory, StageInputs
from torchckpt.pipe.microbatch import MicroBatch
from torchckpt.pipe.partition import Stage
from torchckpt.pipe.run.links import Place, copy, on, wait
from torchckpt.pipe.run.pipeline import output_faults, skips_of
from torchckpt.pipe.skip import StageSkips
from torchckpt.planning import (
    Action,
    Block,
    Kind,
    Schedule,
    Timeline,
    ahead,
    exempt,
    gpipe,
    one_f_one_b,
    simulate,
    with_recompute,
)
from torchckpt.planning.step.measured import Span, measured_timeline
from torchckpt.planning.step.placement import without
from torchckpt.planning.step.simulated import step_of
from torchckpt.regions.clock import Clock
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.options import DEFAULT, Options
from torchckpt.regions.core.pair import checkpoint
from torchckpt.regions.private import profiler_is_on
from torchckpt.regions.trees import tensors_of

__all__ = ["Record", "Step", "schedule_for"]

LossFunction = Callable[..., Tensor]

_WORDS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.RECOMPUTE: "recompute"}


def schedule_for(stages: int, micro_batches: int, recomputes: bool) -> Schedule:
    """1F1B, recomputed one ahead on all stages but the last, which holds one micro-batch at a time. With fewer
    micro-batches than stages: GPipe, recomputed on all stages."""
    is_1f1b = micro_batches >= stages
    plain = (one_f_one_b if is_1f1b else gpipe)(stages, micro_batches)
    choices = exempt(plain, ahead(plain), *(["last_stage"] if is_1f1b else []))
    return with_recompute(plain, choices) if recomputes and stages > 1 else plain


class CopyStreams(NamedTuple):
    """The place of a stage, and its copy streams: one for tensors that leave, one for tensors that arrive. The messages
    of a stream queue in order. None on a device without streams."""

    place: Place
    leaving: torch.Stream | None
    arriving: torch.Stream | None

    @classmethod
    def at(cls, place: Place) -> CopyStreams:
        return cls(place, place.side_stream(), place.side_stream())


class AsyncCopy:
    """A tensor on its way from one stage to another. It leaves when the work queued on its stage so far is done.

    The receiver waits for this copy only, not for the whole stream: the stream may already hold a later message, for
    which the sender has not computed the tensor yet.
    """

    def __init__(self, tensor: Tensor, source: CopyStreams) -> None:
        self._source = source
        (self._tensor,) = wait(source.place.compute, source.leaving, (tensor.detach(),))
        self._ready = _reached(source.leaving)

    def sent(self, target: CopyStreams) -> AsyncCopy:
        """Start the copy to ``target``."""
        if self._source.place != target.place:
            source = self._source
            (self._tensor,) = copy(source.place, source.leaving, target.place, target.arriving, (self._tensor,))
            self._ready = _reached(target.arriving)
        return self

    def arrived(self, place: Place) -> Tensor:
        """The tensor, for work that is launched at ``place`` from now on: its compute stream waits for the copy."""
        if self._ready is not None and place.compute is not None:
            place.compute.wait_event(self._ready)
        return self._tensor.detach()


def _reached(stream: torch.Stream | None) -> torch.Event | None:
    """An event after all work that is queued on ``stream`` now."""
    return None if stream is None else stream.record_event()


class CutTensor:
    """A tensor that goes from one stage to another, and its gradient, which goes back.

    Args:
        forth: the copy of the tensor.
        back: the ports of its gradient: the receiver's, the sender's.
    """

    def __init__(self, tensor: Tensor, forth: AsyncCopy, back: tuple[CopyStreams, CopyStreams]) -> None:
        self._requires_grad, self._back = tensor.requires_grad, back
        # If the receiver has a copy, hold only the graph: the output itself would stay alive until its backward.
        is_elsewhere = back[0].place != back[1].place and tensor.requires_grad
        self.root: Any = get_gradient_edge(tensor) if is_elsewhere else tensor
        self._attributes = tensor.__dict__.copy()
        self._forth: AsyncCopy | None = forth
        self._leaf: Tensor | None = None
        self._arrived: Tensor | None = None
        self._gradient: AsyncCopy | None = None

    def received(self, frame: Frame | None = None) -> Tensor:
        """The input of the receiver's graph: a leaf behind one node, so that layers may change it in place. The node is
        the ``Checkpoint`` of ``frame``, if there is a frame."""
        forth, self._forth = self._forth, None
        if forth is not None:
            leaf = forth.arrived(self._back[0].place).detach().requires_grad_(self._requires_grad)
            self._leaf = leaf
            if frame is not None and self._requires_grad:
                self._arrived = checkpoint(frame, leaf)
            else:
                (self._arrived,) = wait(None, None, (leaf,))
            self._arrived.__dict__.update(self._attributes)
        assert self._arrived is not None
        return self._arrived

    def send_back(self) -> None:
        """Send the gradient back. Call it after the receiver's backward."""
        leaf, self._leaf, self._arrived = self._leaf, None, None
        if leaf is not None and leaf.grad is not None:
            receiver, sender = self._back
            self._gradient = AsyncCopy(leaf.grad, receiver).sent(sender)

    def gradient(self) -> Tensor | None:
        return None if self._gradient is None else self._gradient.arrived(self._back[1].place)


@dataclass
class Visit:
    """The state of one micro-batch in one stage, between its forward and its backward."""

    frame: Frame | None = None
    received: list[CutTensor] = field(default_factory=list)
    sent: list[CutTensor] = field(default_factory=list)
    loss: Tensor | None = None


class Record(NamedTuple):
    """The start and end time of each action of one step."""

    schedule: Schedule
    clocks: list[Clock]
    stamps: list[list[tuple[Action, Any, Any]]]

    def timeline(self) -> Timeline:
        """The step as a timeline, in the same type as a simulated one. Waits for the devices."""
        spans = [_spans(clock, stamps) for clock, stamps in zip(self.clocks, self.stamps)]
        return measured_timeline(step_of(self.schedule, Block(), 0.0), spans)


class Step:
    """One step on one mini-batch. ``run()`` returns the loss, and adds the gradients to the parameters.

    Args:
        targets: the target of each micro-batch.
        loss_fn: maps the output and the target of a micro-batch to a scalar.
        weights: the weight of each micro-batch's loss in the loss of the mini-batch.
        recomputes: whether regions are recomputed; False keeps all activations.
        options: the settings of the regions.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        micro_batches: Sequence[MicroBatch],
        targets: Sequence[Any],
        loss_fn: LossFunction,
        weights: Sequence[float],
        recomputes: bool,
        options: Options = DEFAULT,
    ) -> None:
        self._stages, self._micro_batches, self._targets = stages, micro_batches, targets
        self._loss_fn, self._weights, self._options = loss_fn, weights, options
        self.schedule, self._order = plan(len(stages), len(micro_batches), recomputes)
        actions = [action for order in self.schedule.ranks for action in order]
        self._recomputed = {(stage, i) for stage, kind, i in actions if kind is Kind.RECOMPUTE}
        self._places = [Place.of(stage.device) for stage in stages]
        self._activations = [CopyStreams.at(place) for place in self._places]
        self._gradients = [CopyStreams.at(place) for place in self._places]
        self._clocks = [Clock(stage.device) for stage in stages]
        self._skips = [skips_of(stages) for _ in micro_batches]
        self._inputs: dict[tuple[int, int], Any] = {}
        self._memory: dict[tuple[int, int], Memory] = {}
        self._visits: dict[tuple[int, int], Visit] = {}
        self._losses: list[Tensor] = []
        self._stamps: list[list[tuple[Action, Any, Any]]] = [[] for _ in stages]

    def run(self) -> Tensor:
        doing = {Kind.FORWARD: self._forward, Kind.BACKWARD: self._backward, Kind.RECOMPUTE: self._recompute}
        is_profiled = profiler_is_on()
        for action in self._order:
            stage, kind, i = action
            name = f"torchckpt::{_WORDS[kind]}[stage={stage},mb={i}]"
            with record_function(name) if is_profiled else nullcontext(), on(self._places[stage].compute):
                start = self._clocks[stage].stamp()
                doing[kind](stage, i)
                self._stamps[stage].append((action, start, self._clocks[stage].stamp()))
        return torch.stack(self._losses).sum()

    @property
    def record(self) -> Record:
        return Record(self.schedule, self._clocks, self._stamps)

    def _forward(self, j: int, i: int) -> None:
        stage, skips, visit = self._stages[j], self._skips[i], Visit()
        self._visits[j, i] = visit
        visit.frame = Frame(self._options) if (j, i) in self._recomputed else None
        args, kwargs = self._arguments(j, i, visit)
        arrived = tensors_of((args, kwargs))[0]
        memory = self._memory.pop((j, i)) if j else Memory.of_caller(arrived)
        given = StageInputs(stage.__qualname__, stage.in_place if visit.frame or memory.kept else None, memory.shared)
        run = stage.call(StageSkips(skips, partial(self._received_skip, visit.received, j)), given)
        output, kept = run(*args, **kwargs) if visit.frame is None else visit.frame.forward(run, args, kwargs)
        check(output_faults(stage, output, j + 1 < len(self._stages)))
        leaving, in_flight = tensors_of(output)[0], [*kept.values(), *skips.in_flight()]
        self._memory[j + 1, i] = memory.on_leaving(leaving, in_flight, arrived, visit.frame is not None)
        for name, tensor in kept.items():
            skips.sent(name, tensor, (visit.sent, j, tensor, AsyncCopy(tensor, CopyStreams.at(self._places[j]))))
        if j + 1 < len(self._stages):
            self._inputs[j + 1, i] = pytree.tree_map(partial(self._cut, visit.sent, {}, j), output)
        else:
            self._add_loss(i, visit, output)

    def _arguments(self, j: int, i: int, visit: Visit) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if j == 0:
            batch = self._micro_batches[i]
            here: Any = _moved_tree(self._places[j], (batch.args, batch.kwargs))
            return here[0], here[1]
        return (pytree.tree_map(partial(_received, visit), self._inputs.pop((j, i))),), {}

    def _add_loss(self, i: int, visit: Visit, output: Any) -> None:
        check(self._skips[i].faults())
        target = _moved_tree(self._places[-1], self._targets[i])
        loss = self._loss_fn(output, target)
        check(_loss_faults(loss))
        visit.loss = loss * self._weights[i]
        self._losses.append(visit.loss.detach())

    def _cut(self, cuts: list[CutTensor], made: dict[int, CutTensor], j: int, leaf: Any) -> Any:
        """The cut of a leaf of the output of stage ``j``. A tensor that occurs several times has one cut."""
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in made:
            forth = AsyncCopy(leaf, self._activations[j]).sent(self._activations[j + 1])
            made[id(leaf)] = CutTensor(leaf, forth, (self._gradients[j + 1], self._gradients[j]))
            cuts.append(made[id(leaf)])
        return made[id(leaf)]

    def _received_skip(
        self, received: list[CutTensor], k: int, sent: tuple[list[CutTensor], int, Tensor, AsyncCopy]
    ) -> Tensor:
        """The skip, as a tensor at stage ``k``, which pops it."""
        cuts, j, tensor, copy = sent
        cut = CutTensor(tensor, copy.sent(CopyStreams.at(self._places[k])), (self._gradients[k], self._gradients[j]))
        cuts.append(cut)
        received.append(cut)
        return cut.received()

    def _recompute(self, j: int, i: int) -> None:
        frame = self._visits[j, i].frame
        if frame is not None:
            frame.recompute()

    def _backward(self, j: int, i: int) -> None:
        visit = self._visits.pop((j, i))
        if visit.loss is not None:
            torch.autograd.backward(visit.loss)
        else:
            # Last one first, as in a single graph: gradients of a tensor that left several times add up in that order.
            pairs = [(cut.root, cut.gradient()) for cut in reversed(visit.sent)]
            due = [(root, gradient) for root, gradient in pairs if gradient is not None]
            if due:
                torch.autograd.backward([root for root, _ in due], [gradient for _, gradient in due])
        for cut in visit.received:
            cut.send_back()


@functools.lru_cache(maxsize=16)
def plan(stages: int, micro_batches: int, recomputes: bool) -> tuple[Schedule, list[Action]]:
    """The schedule, and its actions in the order in which one thread launches them."""
    schedule = schedule_for(stages, micro_batches, recomputes)
    return schedule, launch_order(schedule)


def launch_order(schedule: Schedule) -> list[Action]:
    """The actions of all stages, in the order in which they start if a backward takes twice as long as a forward.

    A recompute takes no time, and comes right after the action before it on its stage. So forwards draw the same random
    numbers and gradients add up in the same order, with and without recomputes.
    """
    timeline = simulate(without(schedule), exposed=False)
    found = []
    rest = [list(reversed(order)) for order in schedule.ranks]
    for event in sorted(timeline.events, key=lambda event: (event.start_seconds, event.rank)):
        found.append(rest[event.rank].pop())
        while rest[event.rank] and rest[event.rank][-1].kind is Kind.RECOMPUTE:
            found.append(rest[event.rank].pop())
    return found


def _spans(clock: Clock, stamps: Sequence[tuple[Action, Any, Any]]) -> list[Span]:
    seconds = clock.reader()
    times = [(action, seconds(start), seconds(end)) for action, start, end in stamps]
    return [Span(action, start, start, end) for action, start, end in times]


def _received(visit: Visit, leaf: Any) -> Any:
    if not isinstance(leaf, CutTensor):
        return leaf
    visit.received.append(leaf)
    return leaf.received(visit.frame)


def _moved_tree(place: Place, tree: Any) -> Any:
    """The caller's ``tree`` with its tensors moved to ``place`` and detached."""
    tensors, put_back = tensors_of(tree)
    return put_back([_moved_tensor(place, tensor) for tensor in tensors])


def _moved_tensor(place: Place, tensor: Tensor) -> Tensor:
    if tensor.device == place.device:
        return tensor.detach()
    return AsyncCopy(tensor, CopyStreams.at(Place.of(tensor.device))).sent(CopyStreams.at(place)).arrived(place)


def _loss_faults(loss: object) -> Iterator[Fault]:
    if not (isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad):
        received = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) and loss.dim() else repr(loss)
        rule = "loss_fn(output, target) of a micro-batch returns no scalar that requires grad"
        yield Fault(rule, received, "loss_fn=torch.nn.functional.cross_entropy")
