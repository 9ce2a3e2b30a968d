"""Pipeline: one forward of a mini-batch through the stages, which lays the backward down in the autograd graph.

What micro-batch i leaves in the graph between stage j and stage j + 1, and what the backward does there:

     stage j                                             backward, on which stream
     ───────                                             ─────────────────────────
     region(i, j)      fn in grad mode                   [7] its nodes run, with the slots full          compute j
        │
     gate ◄─ ─ ─ R(i-k, j)                               [6] frees R(i-k, j), which runs after [7]       compute j
        │
     Wait              compute j ─► copy j, i            [5] compute j waits for the gradient            copy j, i
        │
     fork ─ ─ ─► R(i, j)                                 [4] waits, in the graph, for R(i, j)            copy j, i
        │        ┊                                       [3] R(i, j): the replay, waiting for no data    compute j
        │        └┄ ─► gate of (i+k, j)
     Copy              copy j, i ─► copy j+1, i          [2] the gradient's copy is enqueued             both copies
        │
     Wait              copy j+1, i ─► compute j+1        [1] copies wait for the gradient to be made     compute j+1
        │
     region(i, j+1)

R(i, j), the ``Recompute`` of the region, comes before the Wait [5] that makes its stream wait for the copied gradient,
and after nothing that has to do with that gradient: so it overlaps the copy, and all of micro-batch i's backward
downstream. What it does wait for, and what waits for it, is the lane's business (``lane.py``). No edge of a phony
carries data, so none makes one stream wait for another.

Stages on one device share its compute stream and its thread. On the CPU there are no streams: Wait and Copy are left
out, and everything runs in the caller's thread, in clock order.
"""
from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchckpt.errors import Fault, raise_faults
from torchckpt.kernel.flags import is_checkpointing, is_recomputing
from torchckpt.kernel.frame import Frame
from torchckpt.kernel.options import DEFAULT
from torchckpt.kernel.private import hooks_in_force
from torchckpt.pipe.clock import clock_cycles
from torchckpt.pipe.lane import Lane, before
from torchckpt.pipe.links import Place, copy, on, wait
from torchckpt.pipe.microbatch import Batch
from torchckpt.pipe.partition import Stage
from torchckpt.pipe.worker import Run, in_caller, workers

__all__ = ["run_pipeline"]


def run_pipeline(
    stages: Sequence[Stage], micro_batches: Sequence[Batch], checkpointed: int, lookahead: int, threads: bool
) -> list[Batch]:
    """Run every micro-batch through every stage.

    Args:
        checkpointed: how many of the micro-batches, the first ones, run as regions.
        lookahead: how many micro-batches of a stage may be recomputed and alive.
        threads: whether each device has a thread of its own, or all stages run in the caller's. Under saved-tensor
            hooks of the caller, those of an outer region among them, they always do: what hooks see has one order.
    """
    threads = threads and hooks_in_force(False) is None and not (is_checkpointing() or is_recomputing())
    devices = list(dict.fromkeys(stage.device for stage in stages))
    places = [Place.of(stage.device) for stage in stages]
    stations = [Station(stage, place, Lane(lookahead), stage is stages[-1]) for stage, place in zip(stages, places)]
    parcels = [Parcel(batch, Place.of(_tensors(batch)[0].device), None) for batch in micro_batches]
    last = len(parcels) - 1

    def step(i: int, j: int) -> None:
        parcels[i] = stations[j].step(parcels[i], i < checkpointed, i == last)

    # Stages on one device share its generator: one thread runs them, in one order.
    threading: AbstractContextManager[Run] = workers(len(devices)) if threads else nullcontext(in_caller)
    with threading as run:
        for tick in clock_cycles(len(parcels), len(stages)):
            run([(devices.index(stages[j].device), partial(step, i, j)) for i, j in tick])
    return [parcel.batch for parcel in parcels]


class Parcel(NamedTuple):
    """A micro-batch on its way, and where it is: on the compute stream of ``place``, or already on a copy stream."""

    batch: Batch
    place: Place
    stream: torch.Stream | None


class Station:
    """A stage at its place, with its lane: all that one stage does in one forward, and all in one thread."""

    def __init__(self, stage: Stage, place: Place, lane: Lane, final: bool) -> None:
        self._stage, self._place, self._lane, self._final = stage, place, lane, final

    def step(self, parcel: Parcel, checkpointed: bool, last: bool) -> Parcel:
        """Take in a micro-batch, run the stage on it, and let it go. The numbers are those of the drawing."""
        with on(self._place.compute):
            due = self._lane.due()
            batch = self._taken_in(parcel)
            frame = Frame(DEFAULT) if checkpointed and torch.is_grad_enabled() else None
            output = self._stage(batch) if frame is None else frame.forward(self._stage, (batch,), {})  # [7]
            raise_faults("Pipe", _faults(self._stage, output))
            tensors = before(_tensors(output), due)  # [6]
            stream = None if self._final else self._place.side_stream()
            with on(stream):
                tensors = wait(self._place.compute, stream, tensors) if stream else tensors  # [5]
                tensors = self._lane.passed(frame, tensors)  # [4]
            rest = self._lane.rest() if last else []  # [3]
            with on(stream):
                tensors = before(tensors, rest)
        return Parcel(_like(output, tensors), self._place, stream)

    def _taken_in(self, parcel: Parcel) -> Batch:
        batch, place, stream = parcel
        if stream is None and place == self._place:  # it is here already
            return batch
        tensors = _tensors(batch)
        if place.compute and not stream:  # the caller's input, from another device
            stream = place.side_stream()
            with on(stream):
                tensors = wait(place.compute, stream, tensors)
        arrival = self._place.side_stream()
        with on(arrival):
            tensors = copy(place, stream, self._place, arrival, tensors)  # [2]
        return _like(batch, wait(arrival, self._place.compute, tensors))  # [1]


def _tensors(batch: Batch) -> tuple[Tensor, ...]:
    return (batch,) if isinstance(batch, Tensor) else batch


def _like(batch: Batch, tensors: tuple[Tensor, ...]) -> Batch:
    return tensors[0] if isinstance(batch, Tensor) else tensors


def _faults(stage: Stage, output: object) -> list[Fault]:
    if isinstance(output, Tensor) or (isinstance(output, tuple) and all(isinstance(t, Tensor) for t in output)):
        return []
    rule = "a stage must return a tensor or a tuple of tensors"
    received = f"{type(output).__name__}, from {stage.__qualname__}"
    return [Fault(rule, received, "another balance, or a last layer in the stage that returns a tensor")]
