"""Step: forward and backward of a mini-batch in 1F1B order, with a separate autograd graph for each stage.

``loss.backward()`` through one graph can start only after all forwards, so every stage keeps all m micro-batches. Here
the graph is cut between the stages, and stage j of p keeps only p - j micro-batches:

    leaf(i, j) ─► region(i, j) ─► output(i, j)  ┄ detached, copied ┄►  leaf(i, j+1) ─► ...

    F   stage j runs on leaf(i, j), a copy of the output of stage j - 1 that requires grad
    R   its frame is recomputed, one micro-batch ahead of its backward
    B   output(i, j) goes back with the gradient of leaf(i, j+1), copied; likewise the skips that left stage j

The order is that of ``one_f_one_b`` in ``torchckpt.planning``. One thread launches all actions, in the order in which
they would start if a backward took twice as long as a forward, and a recompute no time. On accelerators the launched
work runs asynchronously; stages wait for each other through their streams.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from torchckpt.errors import Fault, check, raise_fault
from torchckpt.measuring.record import Record
from torchckpt.pipe.microbatch import MicroBatch
from torchckpt.pipe.partition import Stage
from torchckpt.pipe.run.links import Place, copy, copy_of, wait
from torchckpt.pipe.run.pipeline import in_profile
from torchckpt.pipe.run.visit import InFlight, Regions, Replay, of_caller, visit
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
from torchckpt.planning.step.measured import measured_timeline
from torchckpt.planning.step.placement import without
from torchckpt.planning.step.simulated import step_of
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.nodes import checkpoint
from torchckpt.regions.devices import mark, on, wait_for
from torchckpt.regions.private import use_count
from torchckpt.tensors import tensors_of

__all__ = ["Order", "Step", "Took", "one_ahead", "timeline_of", "with_replays"]

LossFunction = Callable[..., Tensor]
Took: TypeAlias = tuple[Schedule, list[Record]]
"""The order of a step that has run, and by rank the times of its actions."""


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
        self._ready = mark(source.leaving)

    def sent(self, target: CopyStreams) -> AsyncCopy:
        """Start the copy to ``target``."""
        if self._source.place != target.place:
            source = self._source
            (self._tensor,) = copy(source.place, source.leaving, target.place, target.arriving, (self._tensor,))
            self._ready = mark(target.arriving)
        return self

    def arrived(self, place: Place) -> Tensor:
        """The tensor, for work that is launched at ``place`` from now on: its compute stream waits for the copy."""
        wait_for(place.compute, self._ready)
        return self._tensor.detach()


class CutTensor:
    """A tensor that goes from one stage to another, and its gradient, which goes back.

    Args:
        forth: the copy of the tensor.
        back: the places and streams of its gradient: the receiver's, the sender's.
    """

    def __init__(self, tensor: Tensor, forth: AsyncCopy, back: tuple[CopyStreams, CopyStreams]) -> None:
        self._back = back
        self._requires_grad = tensor.requires_grad
        # Only the graph: the output itself would stay alive until its backward.
        is_elsewhere = back[0].place != back[1].place and tensor.requires_grad
        self.root: Any = get_gradient_edge(tensor) if is_elsewhere else tensor
        self._attributes = tensor.__dict__.copy()
        self._forth = forth
        self._taken: list[Tensor] = []
        self._gradient: AsyncCopy | None = None

    def received(self, frame: Frame | None = None) -> Tensor:
        """The input of the receiver's graph: a leaf behind one node, so that layers may change it in place. The node is
        the ``Checkpoint`` of ``frame``, if there is a frame."""
        leaf = self._forth.arrived(self._back[0].place).detach().requires_grad_(self._requires_grad)
        del self._forth
        if frame is not None and self._requires_grad:
            arrived = checkpoint(frame, leaf)  # [1]
        else:
            (arrived,) = wait(None, None, (leaf,))
        if arrived.grad_fn is not None:
            arrived.grad_fn.register_hook(partial(_take, self._taken))
        arrived.__dict__.update(self._attributes)
        return arrived

    def send_back(self) -> None:
        """Send the gradient back. Call it after the receiver's backward."""
        if self._taken:
            receiver, sender = self._back
            gradient = self._taken.pop()
            if _is_shared(gradient):  # a leaf that is no parameter may have it as its own
                gradient = copy_of(gradient)
            self._gradient = AsyncCopy(gradient, receiver).sent(sender)

    def gradient(self) -> Tensor | None:
        return None if self._gradient is None else self._gradient.arrived(self._back[1].place)


def _take(taken: list[Tensor], gradients: tuple[Tensor | None, ...], _: object) -> tuple[None, ...]:
    """Take the gradient of a leaf into ``taken``: as ``leaf.grad`` it would have the strides of the leaf, by which sums
    behind it round otherwise."""
    gradient = gradients[0]
    if gradient is not None:
        taken[:] = [taken[0] + gradient if taken else gradient]  # several, if a layer has run a backward before
    return (None,) * len(gradients)


@dataclass
class Pending:
    """The state of a stage's visit of a micro-batch, between its forward and its backward."""

    early: Replay | None
    received: list[CutTensor]
    sent: list[CutTensor] = field(default_factory=list)
    loss: Tensor | None = None


class Step:
    """One step that runs, on one mini-batch. ``run()`` returns the loss, and adds the gradients to the parameters.

    Args:
        targets: the target of each micro-batch.
        loss_fn: maps the output and the target of a micro-batch to a scalar.
        weights: the weight of each micro-batch's loss in the loss of the mini-batch.
        order: what runs, on each rank and in all. A rank has stages of one device.
        regions: what runs as regions.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        micro_batches: Sequence[MicroBatch],
        targets: Sequence[Any],
        loss_fn: LossFunction,
        weights: Sequence[float],
        order: Order,
        regions: Regions,
    ) -> None:
        self._stages, self._targets, self._loss_fn = stages, targets, loss_fn
        self._weights, self._order, self._regions = weights, order, regions
        self._places = [Place.of(stage.device) for stage in stages]
        self._activations = [CopyStreams.at(place) for place in self._places]
        self._gradients = [CopyStreams.at(place) for place in self._places]
        self._in_flight = {i: of_caller(batch, stages, lambda x: x) for i, batch in enumerate(micro_batches)}
        self._pending: dict[tuple[int, int], Pending] = {}
        self._losses: list[Tensor] = []
        parameters = [[each for owner in stage.modules for each in owner.parameters()] for stage in stages]
        self._bare = [[parameter for parameter in own if parameter.grad is None] for own in parameters]
        placement = order.schedule.placement
        devices = [stages[placement.index(rank)].device for rank in range(len(order.schedule.ranks))]
        self.took: Took = order.schedule, [Record(device) for device in devices]

    def run(self) -> Tensor:
        actions = {Kind.FORWARD: self._forward, Kind.BACKWARD: self._backward, Kind.RECOMPUTE: self._recompute}
        schedule, records = self.took
        for action in self._order.launched:
            j, kind, i = action
            record = records[schedule.placement[j]]
            with in_profile(kind.name.lower(), j, i), on(self._places[j].compute), self._regions.acting(action):
                start = record.awaits()
                actions[kind](j, i)
                record.ended(action, start)
        for record in records:
            record.end()
        self._regions.finish()
        return torch.stack(self._losses).sum()

    def _forward(self, j: int, i: int) -> None:
        place, batch, is_last = self._places[j], self._in_flight.pop(i), j + 1 == len(self._stages)
        parts, early = self._regions.parts(self._stages[j], i)
        pending = Pending(early, list(batch.transfers) if j else [])
        self._pending[j, i] = pending
        if j == 0:
            arrived = tuple(_moved(place, tensor) for tensor in batch.transfers)
        else:
            arrived = tuple(cut.received(parts[0].frame) for cut in batch.transfers)

        def stash(skip: Tensor) -> tuple[list[CutTensor], int, Tensor, AsyncCopy]:
            return pending.sent, j, skip, AsyncCopy(skip, CopyStreams.at(place))

        fetch = partial(self._received_skip, pending.received, j)
        visited = visit(parts, batch, arrived, fetch, stash, True, is_last)
        batch = visited.onward(
            visited.tensors,
            stash,
            send=lambda output: output if is_last else [self._cut(tensor, j) for tensor in output],
        )
        if is_last:
            self._add_loss(i, pending, batch)
        else:
            pending.sent += batch.transfers
            self._in_flight[i] = batch

    def _add_loss(self, i: int, pending: Pending, batch: InFlight) -> None:
        check(batch.skips.faults())
        (output,), _ = batch.put_back(batch.transfers)
        tensors, put_back = tensors_of(self._targets[i])
        loss = self._loss_fn(output, put_back([_moved(self._places[-1], tensor) for tensor in tensors]))
        if not (isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad):
            received = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) and loss.dim() else repr(loss)
            rule = "loss_fn(output, target) of a micro-batch returns no scalar that requires grad"
            raise_fault(Fault(rule, received, "loss_fn=torch.nn.functional.cross_entropy"))
        pending.loss = loss * self._weights[i]
        self._losses.append(pending.loss.detach())

    def _cut(self, tensor: Tensor, j: int) -> CutTensor:
        forth = AsyncCopy(tensor, self._activations[j]).sent(self._activations[j + 1])
        return CutTensor(tensor, forth, (self._gradients[j + 1], self._gradients[j]))

    def _received_skip(
        self, received: list[CutTensor], k: int, packed: tuple[list[CutTensor], int, Tensor, AsyncCopy]
    ) -> Tensor:
        """The skip, as a tensor at stage ``k``, which pops it."""
        sent, j, tensor, copy = packed
        if j == k:  # from one part of the stage to another
            return tensor
        cut = CutTensor(tensor, copy.sent(CopyStreams.at(self._places[k])), (self._gradients[k], self._gradients[j]))
        sent.append(cut)
        received.append(cut)
        return cut.received()

    def _recompute(self, j: int, i: int) -> None:
        early = self._pending[j, i].early
        if early is not None:
            early.recompute()  # [5]

    def _backward(self, j: int, i: int) -> None:
        pending = self._pending.pop((j, i))
        if pending.loss is not None:
            torch.autograd.backward(pending.loss)
        else:
            # Last one first, as in a single graph: gradients of a tensor that left several times add up in that order.
            pairs = [(cut.root, cut.gradient()) for cut in reversed(pending.sent)]
            due = [(root, gradient) for root, gradient in pairs if gradient is not None]
            if due:
                torch.autograd.backward([root for root, _ in due], [gradient for _, gradient in due])
        self._give_own_memory(j)
        for cut in pending.received:
            cut.send_back()

    def _give_own_memory(self, j: int) -> None:
        """Give first gradients memory of their own. Autograd may give two parameters the same, or one and a cut."""
        for parameter in self._bare[j]:
            gradient = parameter.grad
            if gradient is not None and _is_shared(gradient):
                parameter.grad = copy_of(gradient)
        self._bare[j] = [parameter for parameter in self._bare[j] if parameter.grad is None]


def _is_shared(gradient: Tensor) -> bool:
    """Whether another tensor has the memory of ``gradient``, too: a later backward may add to it in place."""
    return gradient.layout == torch.strided and use_count(gradient) > 1


def timeline_of(took: Took) -> Timeline:
    """The step as a timeline, in the same type as a simulated one. Waits for the devices."""
    schedule, records = took
    return measured_timeline(step_of(schedule, Block(), 0.0), [record.spans()[-1] for record in records])


class Order(NamedTuple):
    """What a step runs."""

    schedule: Schedule
    launched: Sequence[Action]
    """The actions of all ranks, in the order in which one thread launches them."""


@functools.lru_cache(maxsize=16)
def one_ahead(stages: int, micro_batches: int, recomputes: bool) -> Order:
    """1F1B, recomputed one ahead on all stages but the last, which holds one micro-batch at a time. With fewer
    micro-batches than stages: GPipe, recomputed on all stages."""
    is_1f1b = micro_batches >= stages
    schedule = (one_f_one_b if is_1f1b else gpipe)(stages, micro_batches)
    if recomputes and stages > 1:
        schedule = with_recompute(schedule, exempt(schedule, ahead(schedule), *(["last_stage"] if is_1f1b else [])))
    return Order(schedule, _launched(schedule))


def _launched(schedule: Schedule) -> list[Action]:
    """The actions of all stages, in the order in which they start if a backward takes twice as long as a forward.

    A recompute takes no time, and comes right after the action before it on its stage. So forwards draw the same random
    numbers and gradients add up in the same order, with and without recomputes.
    """
    timeline = simulate(without(schedule), exposed=False)
    events = sorted(timeline.events, key=lambda event: (event.start_seconds, event.rank))
    return with_replays([event.action for event in events], schedule)


def with_replays(launched: Sequence[Action], schedule: Schedule) -> list[Action]:
    """``launched`` with the recomputes of ``schedule``, each right after the action before it on its rank."""
    order: list[Action] = []
    rest = [list(reversed(rank)) for rank in schedule.ranks]
    for action in launched:
        left = rest[schedule.placement[action.stage]]
        order.append(left.pop())
        while left and left[-1].kind is Kind.RECOMPUTE:
            order.append(left.pop())
    return order


def _moved(place: Place, tensor: Tensor) -> Tensor:
    """The caller's ``tensor``, moved to ``place`` and detached."""
    if tensor.device == place.device:
        return tensor.detach()
    return AsyncCopy(tensor, CopyStreams.at(Place.of(tensor.device))).sent(CopyStreams.at(place)).arrived(place)
