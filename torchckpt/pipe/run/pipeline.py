"""Pipeline: runs the forward of a mini-batch through the stages, and builds the autograd graph for the backward.

The nodes of micro-batch i between stage j and stage j + 1, and what the backward does at each:

     stage j                                             backward, on which stream
     ───────                                             ─────────────────────────
     Checkpoint ◄─ ─ ─ R(i-k, j)                         [7] the region's end frees R(i-k, j)            compute j
        │
     region(i, j)      fn in grad mode                   [6] its nodes run, with the slots full          compute j
        │
     Wait              compute j ─► copy j, i            [5] compute j waits for the gradient            copy j, i
        │
     fork ─ ─ ─► R(i, j)                                 [4] waits, in the graph, for R(i, j)            copy j, i
        │        ┊                                       [3] R(i, j): the replay, waiting for no data    compute j
        │        └┄ ─► Checkpoint of (i+k, j)
     Copy              copy j, i ─► copy j+1, i          [2] the gradient's copy is enqueued             both copies
        │
     Wait              copy j+1, i ─► compute j+1        [1] copies wait for the gradient to be made     compute j+1
        │
     region(i, j+1)

R(i, j), the ``Recompute`` of the region, runs before the Wait [5] that makes its stream wait for the copied gradient,
and needs nothing that depends on this gradient. So it overlaps the copy, and the whole backward of micro-batch i in
later stages. ``lane.py`` decides what it waits for, and what waits for it. Edges of phonies carry no data, so they
never make a stream wait for another. If no input of the region requires grad (the first stage), or the region has
several outputs, no ``Checkpoint`` can take the phony of R(i-k, j), and the region's outputs take it.

In the forward, a Wait node waits itself. In the backward, the engine waits: before it runs a node, it makes the node's
stream, which was current in its forward, wait for the streams that made the node's gradients. So at [1] the stream of
the Copy waits, and at [5] the stream of the region.

Stages on one device share its compute stream and its thread. The CPU has no streams: Wait and Copy are left out, and
everything runs in the caller's thread, in clock order.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils import _pytree as pytree

from torchckpt.errors import Fault, check
from torchckpt.pipe.in_place import NOTHING_SHARED, Memory, StageInputs
from torchckpt.pipe.microbatch import MicroBatch
from torchckpt.pipe.partition import Stage
from torchckpt.pipe.run.lane import Edges, Lane, before
from torchckpt.pipe.run.links import Place, copy, on, wait
from torchckpt.pipe.run.worker import Run, in_caller, is_bound_to_caller, workers
from torchckpt.pipe.skip import Name, Skips, StageSkips
from torchckpt.pipe.skip_search import stasher_behind
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.options import DEFAULT, Options
from torchckpt.regions.core.pair import checkpoint
from torchckpt.regions.private import profiler_is_on
from torchckpt.regions.trees import PutBack, hides_tensors, tensors_of

__all__ = ["clock_cycles", "output_faults", "run_pipeline", "skips_of"]

def clock_cycles(m: int, p: int) -> Iterator[list[tuple[int, int]]]:
    """The pairs (micro-batch, stage) of each clock tick. The pairs of one tick do not depend on each other.

    >>> list(clock_cycles(m=3, p=2))
    [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]
    """
    for tick in range(m + p - 1):
        yield [(tick - stage, stage) for stage in range(max(0, tick - m + 1), min(p, tick + 1))]


def run_pipeline(
    stages: Sequence[Stage],
    micro_batches: Sequence[MicroBatch],
    checkpointed: int,
    lookahead: int,
    threads: bool,
    options: Options = DEFAULT,
) -> list[Any]:
    """Run every micro-batch through every stage.

    Args:
        checkpointed: the number of micro-batches, counted from the first, that run as regions.
        lookahead: how many micro-batches of a stage may hold recomputed activations at the same time.
        threads: whether each device has its own thread. If False, or if the caller's thread is in a state that other
            threads cannot share (``is_bound_to_caller``), all stages run in the caller's thread.
        options: the settings of the regions.
    """
    threads = threads and not is_bound_to_caller()
    devices = list(dict.fromkeys(stage.device for stage in stages))
    places = [Place.of(stage.device) for stage in stages]
    runners = [
        StageRunner(stage, place, Lane(lookahead), stage is stages[-1], options) for stage, place in zip(stages, places)
    ]
    callers: dict[torch.device, Place] = {}
    in_flight = [InFlight.of_caller(batch, skips_of(stages), callers) for batch in micro_batches]
    last = len(in_flight) - 1

    profiled = profiler_is_on()

    def step(i: int, j: int) -> None:
        with record_function(f"torchckpt::forward[stage={j},mb={i}]") if profiled else nullcontext():
            in_flight[i] = runners[j].step(in_flight[i], i < checkpointed, i == last)

    # Stages on one device share its generator, so one thread runs them in a fixed order.
    threading: AbstractContextManager[Run] = workers(len(devices)) if threads else nullcontext(in_caller)
    with threading as run:
        for tick in clock_cycles(len(in_flight), len(stages)):
            run([(devices.index(stages[j].device), partial(step, i, j)) for i, j in tick])
    for batch in in_flight:
        check(batch.skips.faults())
    return [batch.args[0] for batch in in_flight]


def skips_of(stages: Sequence[Stage]) -> Skips:
    layers = [layer for stage in stages for layer in stage.layers]
    return Skips(partial(stasher_behind, layers))


class Transfer(NamedTuple):
    """Tensors to be moved, and where they are: on the compute stream of ``place``, or on the copy stream ``stream``."""

    tensors: tuple[Tensor, ...]
    place: Place
    stream: torch.Stream | None


class InFlight(NamedTuple):
    """A micro-batch between two stages: the arguments of the next stage, and the skips."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    at: tuple[Place, torch.Stream | None] | None
    """The place and copy stream of the tensors; None if they are the caller's, each on its own device."""
    skips: Skips
    memory: Memory
    callers: dict[torch.device, Place]
    """The caller's place on each device: the current streams of a worker thread differ from the caller's."""

    @classmethod
    def of_caller(cls, batch: MicroBatch, skips: Skips, callers: dict[torch.device, Place]) -> InFlight:
        """The batch of a micro-batch before the first stage. Call it in the caller's thread; it fills ``callers``."""
        tensors, _ = _tensors((batch.args, batch.kwargs))
        for tensor in tensors:
            if tensor.device not in callers:
                callers[tensor.device] = Place.of(tensor.device)
        return cls(batch.args, batch.kwargs, None, skips, Memory.of_caller(tensors), callers)


class StageRunner:
    """One stage in one forward, with its place and its lane. Only one thread uses it."""

    def __init__(self, stage: Stage, place: Place, lane: Lane, final: bool, options: Options) -> None:
        self._stage, self._place, self._lane, self._final = stage, place, lane, final
        self._options = options

    def step(self, batch: InFlight, checkpointed: bool, last: bool) -> InFlight:
        """Run the stage on a micro-batch, and return the batch for the next stage. Numbers refer to the drawing."""
        frame = Frame(self._options) if checkpointed and torch.is_grad_enabled() else None
        with on(self._place.compute):
            due = self._lane.due()
            arrived, put_back = self._taken_in(batch)
            if frame is not None:
                arrived, due = behind_checkpoints(frame, arrived, due)  # [7]
            args, kwargs = put_back(arrived)
            call = self._stage.call(StageSkips(batch.skips, partial(_fetched, self._place)), self._given(batch, frame))
            returned = call(*args, **kwargs) if frame is None else frame.forward(call, args, kwargs)  # [6]
            is_cut = self._place.compute is not None and not self._final
            check(output_faults(self._stage, returned[0], is_cut))
            tensors, put_back = _tensors(returned)
            memory = _memory(batch, returned, tensors, arrived)
            stream = None if self._final else self._place.side_stream()
            if stream is not None:
                tensors, due = before(tensors, due), []
            with on(stream):
                tensors = wait(self._place.compute, stream, tensors) if stream else tensors  # [5]
                tensors = self._lane.passed(frame, tensors, due)  # [4]
            rest = self._lane.rest() if last else []  # [3]
            with on(stream):
                tensors = before(tensors, rest)
        output, skips = put_back(tensors)
        self._send(batch.skips, skips, stream)
        return InFlight((output,), {}, (self._place, stream), batch.skips, memory, batch.callers)

    def _given(self, batch: InFlight, frame: Frame | None) -> StageInputs | None:
        """None if the layers may work on their inputs directly: autograd itself sees their in-place changes."""
        on_copies = frame is not None or bool(batch.memory.kept)
        if not on_copies and self._place.compute is None:
            return None
        known = self._stage.in_place if on_copies else None
        return StageInputs(self._stage.__qualname__, known, batch.memory.shared)

    def _send(self, skips: Skips, kept: dict[Name, Tensor], stream: torch.Stream | None) -> None:
        for name, tensor in kept.items():
            skips.sent(name, tensor, Transfer((tensor,), self._place, stream))

    def _taken_in(self, batch: InFlight) -> tuple[tuple[Tensor, ...], PutBack]:
        tensors, put_back = _tensors((batch.args, batch.kwargs))
        if batch.at is not None:
            return moved(Transfer(tensors, *batch.at), self._place), put_back
        transfers = (Transfer((tensor,), batch.callers[tensor.device], None) for tensor in tensors)
        return tuple(moved(transfer, self._place)[0] for transfer in transfers), put_back


def _memory(
    batch: InFlight, returned: tuple[Any, dict[Name, Tensor]], tensors: Sequence[Tensor], arrived: Sequence[Tensor]
) -> Memory:
    """The memory of the tensors that leave a stage, skips included. ``returned`` is what the stage returned."""
    output, kept = returned
    if batch.memory is NOTHING_SHARED and len(tensors) == 1 and not batch.skips.are_any:  # the case of most stages
        return NOTHING_SHARED
    leaving = tensors_of(output)[0] if kept else tensors
    return batch.memory.on_leaving(leaving, [*kept.values(), *batch.skips.in_flight()], arrived)


def _fetched(place: Place, transfer: Transfer) -> Tensor:
    return moved(transfer, place)[0]


def moved(transfer: Transfer, target: Place) -> tuple[Tensor, ...]:
    """The tensors of ``transfer`` on the compute stream of ``target``."""
    tensors, place, stream = transfer
    if not tensors or (stream is None and place == target):  # it is here already
        return tensors
    if place.compute and not stream:  # the caller's input, from another device
        stream = place.side_stream()
        with on(stream):
            tensors = wait(place.compute, stream, tensors)
    arrival = target.side_stream()
    with on(arrival):
        tensors = copy(place, stream, target, arrival, tensors)  # [2]
    return wait(arrival, target.compute, tensors)  # [1]


def behind_checkpoints(frame: Frame, inputs: tuple[Tensor, ...], due: Edges) -> tuple[tuple[Tensor, ...], Edges]:
    """Put a ``Checkpoint`` of ``frame`` on each of ``inputs`` that requires grad and is no leaf. If the stage has one
    output, these nodes take the phonies of ``due``; return the ``inputs``, and the part of ``due`` that is left. With
    several outputs, the phonies of one would lead the backward into the branches of another."""
    inner = [tensor.requires_grad and not tensor.is_leaf for tensor in inputs]
    if not any(inner):
        return inputs, due
    (edges,), due = (due, []) if len(due) == 1 else ([()], due)
    return tuple(checkpoint(frame, x, *edges) if is_inner else x for x, is_inner in zip(inputs, inner)), due


def _tensors(tree: Any) -> tuple[tuple[Tensor, ...], PutBack]:
    """As :func:`tensors_of`, but faster for the usual (args, kwargs) of a stage, and for what a call returns."""
    first, second = tree
    if not second and isinstance(first, Tensor) and not first.__dict__:
        return (first,), lambda tensors: (tensors[0], {})  # what most stages return
    is_one = not second and type(first) is tuple and len(first) == 1 and isinstance(first[0], Tensor)
    if is_one and not first[0].__dict__:
        return first, lambda tensors: (tensors, {})  # the arguments of most stages
    return tensors_of(tree)


def output_faults(stage: Stage, output: object, is_cut: bool) -> list[Fault]:
    """The faults of the ``output`` of ``stage``. ``is_cut``: its tensors are moved, or their graph ends here."""
    if isinstance(output, Tensor) and output.device == stage.device:
        return []
    leaves = pytree.tree_leaves(output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    hidden = [type(leaf).__name__ for leaf in leaves if hides_tensors(leaf)] if is_cut else []
    if hidden:
        rule = "a stage returns tensors in a container that torch's pytree does not know, unlike list, tuple and dict"
        works = "a layer that returns a dict; or torch.utils._pytree.register_pytree_node for that class"
        return [Fault(rule, f"a {hidden[0]} that has tensors, from {stage.__qualname__}", works)]
    if not tensors:
        rule = "a stage returns no tensor, and nothing that holds one"
        works = "a last layer in the stage that returns a tensor"
        return [Fault(rule, f"{type(output).__name__}, from {stage.__qualname__}", works)]
    elsewhere = sorted({str(tensor.device) for tensor in tensors if tensor.device != stage.device})
    if elsewhere:
        received = f"a tensor on {', '.join(elsewhere)}, from {stage.__qualname__} on {stage.device}"
        works = "a layer that makes its tensors on the device of its input: torch.zeros(n, device=x.device)"
        return [Fault("the output of a stage is not on its device", received, works)]
    return []
