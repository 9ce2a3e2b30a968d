"""Pipeline: runs the forward of a mini-batch through the stages, and builds the autograd graph for the backward.

``torchckpt.regions`` draws the graph of a region between two stages, and numbers its nodes. This is where the nodes of
micro-batch i between stage j and stage j + 1 run, with look-ahead k:

                      forward                       backward

    [1] Checkpoint    compute j                     compute j       is [8] for R(i-k, j)
    [2] region(i, j)  compute j                     compute j
    [3] Wait          compute j ─► copy j, i        copy j, i
    [4] fork          copy j, i                     copy j, i
    [5] R(i, j)       compute j                     compute j       its [8] is [1] of micro-batch i+k
    [6] Copy          copy j, i ─► copy j+1, i      both copies
    [7] Wait          copy j+1, i ─► compute j+1    compute j+1

R(i, j), the ``Recompute`` of the region, runs before the Wait [3] that makes its stream wait for the copied gradient,
and needs nothing that depends on this gradient. So it overlaps the copy, and the whole backward of micro-batch i in
later stages. ``Lane``, the regions of one stage in order, decides what it waits for, and what waits for it: how far
ahead of its backwards replays may run. Edges of phonies carry no data, so they never make a stream wait for another. If
no input of the region requires grad (the first stage), or the region has several outputs, no ``Checkpoint`` can take
the phony of R(i-k, j), and the region's outputs take it.

In the forward, a Wait node waits itself. In the backward, the engine waits: before it runs a node, it makes the node's
stream, which was current in its forward, wait for the streams that made the node's gradients. So at [7] the stream of
the Copy waits, and at [3] the stream of the region.

Stages on one device share its compute stream and its thread. The CPU has no streams: Wait and Copy are left out, and
everything runs in the caller's thread, in clock order.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import chain, repeat, zip_longest
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.profiler import record_function

from torchckpt.errors import check
from torchckpt.pipe.microbatch import MicroBatch
from torchckpt.pipe.partition import Stage
from torchckpt.pipe.run.links import Place, copy, wait
from torchckpt.pipe.run.visit import InFlight, Part, Regions, Replay, of_caller, visit
from torchckpt.pipe.run.worker import RunTasks, in_caller, is_bound_to_caller, keep_workers, workers
from torchckpt.planning import Action, Kind
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.nodes import checkpoint, fork, join, recompute
from torchckpt.regions.devices import on
from torchckpt.regions.private import profiler_is_on

__all__ = ["clock_cycles", "in_profile", "run_pipeline"]

Edges: TypeAlias = list[list[Tensor]]
"""For each output of the stage, its phonies. Each output has its own ``Recompute`` nodes, of the same frame: with
common nodes, a backward would enter branches that its loss does not use."""


class Lane:
    """The lane of one stage in one forward: its regions in order. (On paper, a ``Lane`` is a rank.)

    With look-ahead k, the backward of a lane runs the replays R and the backwards B of its regions in a fixed order,
    no matter when the gradients arrive. For k = 2:

        R3 R2 B3 R1 B2 R0 B1 B0

    R(i) comes between B(i+k) and B(i+k-1), so at most k micro-batches hold recomputed activations. With k = 1, *one
    ahead*, R(i) runs as soon as B(i+1) is done, while the gradient of micro-batch i is still on its way. The edges:

        B(i+k)  before  R(i):     R(i)'s phony goes into the Checkpoint of micro-batch i+k, the last node of B(i+k).
                                  If that region has no Checkpoint, the phony goes into its output. R(i) was made
                                  before that region ran, in the same thread, so the engine runs the region first
        R(i)  before  B(i+k-1):   R(i) is made of phonies forked from the outputs of micro-batches i to i+k-1

    The last k regions have no B(i+k). Their replays are joined to the last micro-batch's output, so they run first.
    """

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead
        self._frames: list[Replay | None] = []  # by micro-batch; None: nothing is replayed early
        self._forked: list[Edges] = []  # by micro-batch

    def due(self) -> Edges:
        """The replay, if there is one, that runs after the backward of the next micro-batch.

        Call it before anything else is done for that micro-batch.
        """
        place = len(self._frames) - self._lookahead
        return self._replays(place, place + 1) if place >= 0 else []

    def passed(self, frame: Replay | None, outputs: tuple[Tensor, ...], due: Edges) -> tuple[Tensor, ...]:
        """Add the next micro-batch's region. Return ``outputs`` with the forks at which its backward waits for its
        replay, and with the replays of ``due`` joined.

        If the last micro-batches keep their activations, ``due`` is not joined: the backward that needs it starts the
        replay. On a last stage all gradients arrive at once, and without streams a replay overlaps nothing.
        """
        self._frames.append(frame)
        if not any(self._frames[-self._lookahead :]):  # no replay will depend on these outputs
            self._forked.append([])
            return outputs
        edges = chain(due, repeat([]))
        pairs = zip(outputs, edges)
        forked = [fork(output, *phonies) if output.requires_grad else (output, None) for output, phonies in pairs]
        self._forked.append([[] if edge is None else [edge] for _, edge in forked])
        return tuple(tensor for tensor, _ in forked)

    def rest(self) -> Edges:
        """The replays that run before the backward of the last micro-batch. Call it after the last ``passed``."""
        count = len(self._frames)
        return self._replays(max(0, count - self._lookahead), count)

    def _replays(self, first: int, end: int) -> Edges:
        return _together([self._replay(place) for place in range(first, end)])

    def _replay(self, place: int) -> Edges:
        frame = self._frames[place]
        forked = _together(self._forked[place : place + self._lookahead])
        return [] if frame is None else [[recompute(frame, *edges)] if edges else [] for edges in forked]


def before(outputs: tuple[Tensor, ...], replays: Edges) -> tuple[Tensor, ...]:
    """``outputs`` as new tensors. The backward of each runs before its ``replays``."""
    joined = list(outputs)
    for place, (tensor, edges) in enumerate(zip(outputs, replays)):
        if edges and tensor.requires_grad:
            joined[place] = join(tensor, *edges)
    return tuple(joined)


def _together(several: list[Edges]) -> Edges:
    return [list(chain.from_iterable(edges)) for edges in zip_longest(*several, fillvalue=[])]


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
    regions: Regions,
    lookahead: int,
    threads: bool,
) -> list[Any]:
    """Run every micro-batch through every stage.

    Args:
        regions: what runs as regions.
        lookahead: how many micro-batches of a stage may hold recomputed activations at the same time.
        threads: whether each device has its own thread. If False, or if the caller's thread is in a state that other
            threads cannot share (``is_bound_to_caller``), all stages run in the caller's thread.
    """
    threads = threads and not is_bound_to_caller()
    devices = list(dict.fromkeys(stage.device for stage in stages))
    places = [Place.of(stage.device) for stage in stages]
    lanes = [Lane(lookahead) for _ in stages]
    home = cache(Place.of)  # called in this thread: the current streams of a worker are others
    in_flight = [
        of_caller(batch, stages, lambda tensor: Transfer((tensor,), home(tensor.device), None))
        for batch in micro_batches
    ]
    last = len(in_flight) - 1

    def step(i: int, j: int) -> None:
        with in_profile("forward", j, i):
            is_last = stages[j] is stages[-1]
            in_flight[i] = run_stage(stages[j], places[j], lanes[j], regions, i, in_flight[i], is_last, i == last)

    # Stages on one device share its generator, so one thread runs them in a fixed order.
    threading: AbstractContextManager[RunTasks] = workers(len(devices)) if threads else nullcontext(in_caller)
    with threading as run:
        for tick in clock_cycles(len(in_flight), len(stages)):
            run([(devices.index(stages[j].device), partial(step, i, j)) for i, j in tick])
        if threads:
            keep_workers(tensor for batch in in_flight for sent in batch.transfers for tensor in sent.tensors)
    for batch in in_flight:
        check(batch.skips.faults())
    return [batch.put_back(batch.transfers[0].tensors)[0][0] for batch in in_flight]


def in_profile(action: str, stage: int, i: int) -> AbstractContextManager[Any]:
    """A range of torch's profiler, if one runs in this thread, for an action of ``stage`` on micro-batch ``i``."""
    return record_function(f"torchckpt::{action}[stage={stage},mb={i}]") if profiler_is_on() else nullcontext()


# a visit in one graph -------------------------------------------------------------------------------------------------


def run_stage(
    stage: Stage, place: Place, lane: Lane, regions: Regions, i: int, batch: InFlight, is_last: bool, ends: bool
) -> InFlight:
    """Run ``stage`` on micro-batch ``i``, and return the batch for the next stage. Only one thread uses a ``lane``.

    Args:
        is_last: whether there is no next stage.
        ends: whether no other micro-batch comes.
    """
    parts, early = regions.parts(stage, i) if torch.is_grad_enabled() else ([Part(stage, None)], None)
    frame = parts[0].frame
    is_cut = place.compute is not None
    with on(place.compute):
        due = lane.due()
        arrived = tuple(tensor for transfer in batch.transfers for tensor in moved(transfer, place))
        if frame is not None:
            arrived, due = behind_checkpoints(frame, arrived, due)  # [1], [8]
        with regions.acting(Action(stage.number, Kind.FORWARD, i)):
            visited = visit(  # [2]
                parts,
                batch,
                arrived,
                fetch=lambda skip: moved(skip, place)[0],
                stash=lambda skip: Transfer((skip,), place, None),
                is_cut=is_cut,
                is_last=is_last,
            )
        tensors = visited.tensors
        regions.forwarded(stage.number, i, arrived, tensors)
        stream = None if is_last else place.side_stream()
        if stream is not None:
            tensors, due = before(tensors, due), []  # [8]
        with on(stream):
            tensors = wait(place.compute, stream, tensors) if stream else tensors  # [3]
            tensors = lane.passed(early, tensors, due)  # [4]
        rest = lane.rest() if ends else []  # [5]
        with on(stream):
            tensors = before(tensors, rest)  # [8]
    return visited.onward(
        tensors,
        stash=lambda skip: Transfer((skip,), place, stream),
        send=lambda output: [Transfer(output, place, stream)],
    )


class Transfer(NamedTuple):
    """Tensors to be moved, and where they are: on the compute stream of ``place``, or on the copy stream ``stream``."""

    tensors: tuple[Tensor, ...]
    place: Place
    stream: torch.Stream | None


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
        tensors = copy(place, stream, target, arrival, tensors)  # [6]
    return wait(arrival, target.compute, tensors)  # [7]


def behind_checkpoints(frame: Frame, inputs: tuple[Tensor, ...], due: Edges) -> tuple[tuple[Tensor, ...], Edges]:
    """Put a ``Checkpoint`` of ``frame`` on each of ``inputs`` that requires grad and is no leaf. If the stage has one
    output, these nodes take the phonies of ``due``; return the ``inputs``, and the part of ``due`` that is left. With
    several outputs, the phonies of one would lead the backward into the branches of another."""
    inner = [tensor.requires_grad and not tensor.is_leaf for tensor in inputs]
    if not any(inner):
        return inputs, due
    (edges,), due = (due, []) if len(due) == 1 else ([()], due)
    return tuple(checkpoint(frame, x, *edges) if is_inner else x for x, is_inner in zip(inputs, inner)), due
