"""Meeting: what ranks tell each other, and a collective call that a rank does not make.

A collective that one rank alone enters ends with the timeout of its group, and names nothing. So ranks first say in
turns which call they make. Nothing of this is in a step.

The records of all ranks, of measured steps, are told and combined here as well.
"""
from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from torchckpt.errors import (
    ArgumentError,
    BudgetInfeasible,
    CheckpointError,
    Fault,
    ScheduleError,
    named,
    without_generators,
    without_traceback,
)
from torchckpt.measuring.link import MeasuredLink
from torchckpt.measuring.record import Record
from torchckpt.planning import Action, Block, Kind, Schedule, Stage, Step, fixed, to_csv
from torchckpt.planning.order.schedule import Visit
from torchckpt.planning.plan import PipelinePlan
from torchckpt.planning.plan.run.fit_measured import Fitted
from torchckpt.planning.step.measured import Span, Spans, measured_step
from torchckpt.planning.step.memory import Level, Piece
from torchckpt.ranks.turns import Absent, told_by_all

__all__ = [
    "Gathered", "all_gather", "broadcast", "check_the_same", "combined", "gather", "larger_level", "meeting",
    "none_failed", "order_told", "read", "together", "written",
]


def all_gather(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values ``mine`` of all processes, in the order of ranks. Collective: all processes must call it.

    ``dist.all_gather_object`` needs NumPy, in ``_tensor_to_object`` of ``torch/distributed/distributed_c10d.py``
    (2.13). This function, and :func:`broadcast`, end when it needs none.
    """
    data, device, ranks = written(mine), _device_of(group), dist.get_world_size(group)
    size = torch.tensor([len(data)], device=device)
    sizes = [torch.empty_like(size) for _ in range(ranks)]
    dist.all_gather(sizes, size, group=group)
    longest = max(map(int, sizes))
    padded = _tensor_of(data.ljust(longest)).to(device)  # with spaces
    gathered = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(gathered, padded, group=group)
    return [_object_of(each) for each in gathered]


def order_told(schedule: Schedule, which: str) -> tuple[str, str]:
    """The order of all actions, which ranks compare, and its name in an error. ``which`` tells it from others there."""
    order = to_csv(schedule)
    return order, f"{schedule.name} {which} in order {crc32(order.encode()):08x}"


def none_failed(failure: CheckpointError | None) -> None:
    """Raise what some process could not do, on all of them: else they would wait for it. Collective, likewise."""
    failures = [each for each in all_gather(failure) if each is not None]
    if failures:
        raise without_traceback(failures[0])


def broadcast(mine: Any) -> Any:
    """Return the value ``mine`` of rank 0. Collective: all processes must call it."""
    data, device = written(mine), _device_of(None)
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, src=0)
    sent = _tensor_of(data.ljust(int(size))[: int(size)]).to(device)
    dist.broadcast(sent, src=0)
    return _object_of(sent)


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _object_of(sent: Tensor) -> Any:
    data = bytearray(sent.numel())
    torch.frombuffer(data, dtype=torch.uint8).copy_(sent)
    return read(data)


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """The device of the collectives of ``group``: the CPU if they can run there, else the current accelerator."""
    devices = [backend.partition(":")[0] for backend in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in devices else devices[0])


@contextmanager
def meeting(call: str, group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """Inside the block, all ranks of ``group`` make this ``call``, such as ``"report()"``, and may be collective.

    A rank waits for half of the timeout of the group, and warns before.

    Raises:
        ScheduleError: a rank does not make the call, or makes another one, or is lost in it.
    """
    ranks = dist.group.WORLD if group is None else group
    if ranks is not None and ranks.size() > 1:
        _meet(call, ranks, device)
    try:
        yield
    except CheckpointError:
        raise
    except RuntimeError as error:  # of the group
        raise _refusal(call, named(error)) from without_generators(error)


@contextmanager
def together(purpose: str) -> Iterator[None]:
    """Inside the block, all ranks tell each other something, for this ``purpose``.

    Raises:
        ScheduleError: a rank does not, or is lost.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CheckpointError):
            raise
        rule = f"the ranks could not {purpose}: rank {dist.get_rank()} did not hear from all others"
        works = "the same steps on every rank; another one failed before, and says at what itself"
        raise ScheduleError(str(Fault(rule, named(error), works))) from without_generators(error)


def check_the_same(what: str, told: Sequence[tuple[str, str]]) -> None:
    """Raise ``ScheduleError`` unless all ranks have told the same key. Call it on all ranks.

    Args:
        what: the name of what has to be the same, for the error.
        told: the key of each rank, and how an error shows it.
    """
    key, shown = told[0]
    for rank, (other, shown_there) in enumerate(told):
        if other != key:
            received = f"{shown} on rank 0, {shown_there} on rank {rank}"
            works = "recompute_ahead() with the same arguments on every rank"
            raise ScheduleError(str(Fault(f"the ranks do not have the same {what}", received, works)))


def _meet(call: str, group: dist.ProcessGroup, device: torch.device) -> None:
    try:
        calls = told_by_all(call, "meeting", group, device, f"schedule.{call} is collective: it waits for", 7)
    except Absent as absent:
        raise _refusal(call, f"{call} on rank {group.rank()}, {absent}") from None
    if calls is not None and len(set(calls)) > 1:
        raise _refusal(call, ", ".join(f"{other} on rank {rank}" for rank, other in enumerate(calls)))


def _refusal(call: str, received: str) -> ScheduleError:
    name = call.removesuffix("()")
    rule = f"schedule.{call} did not complete on every rank of the pipeline: it is collective"
    works = f"{name} = schedule.{call} on every rank; then, on one: print({name})"
    return ScheduleError(str(Fault(rule, received, works)))


# what is told, as JSON: plain data, and the classes that are listed here ----------------------------------------------


_OBJECTS = (
    Action, ArgumentError, Block, BudgetInfeasible, CheckpointError, Fitted, Kind, Level, MeasuredLink, Piece,
    ScheduleError, Span, Stage,
)
_MAKERS: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in _OBJECTS},
    "dict": lambda *pairs: dict(pairs),
    "tuple": lambda *values: values,
    "PipelinePlan": PipelinePlan.from_json,
}


def written(value: object) -> bytes:
    """``value`` as a message: numbers, text, lists, tuples, dictionaries, and objects of the classes above."""
    return json.dumps(_plain(value)).encode()


def read(message: bytearray) -> Any:
    """The value of a message."""
    return json.loads(message, object_hook=lambda part: next(_MAKERS[name](*parts) for name, parts in part.items()))


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_plain, value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    name = "dict" if isinstance(value, Mapping) else type(value).__name__
    return {name: [*map(_plain, _parts(value))]}


def _parts(value: Any) -> Iterable[Any]:
    """What the maker of ``value`` takes."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, CheckpointError):
        return str(value), *value.__reduce__()[1][1:]
    if isinstance(value, PipelinePlan):
        return (value.to_json(),)
    return (value.value,) if isinstance(value, Kind) else [getattr(value, field.name) for field in fields(value)]


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_UNKNOWN = Stage((fixed(),))
"""A stage whose bytes were not counted yet."""


class Gathered(NamedTuple):
    """The measurements of all ranks of a group; equal on every rank."""

    step: Step
    """The step that was run, with the medians that were measured; each region is a block of its stage."""
    spans: list[Spans]
    """The spans of each kept step. If the pipeline has replicas, the steps of the first come first."""


def gather(
    schedule: Schedule,
    kept: Collection[Visit],
    segments: int | None,
    rank: int,
    record: Record,
    counted: Mapping[int, Stage],
    group: dist.ProcessGroup | None,
) -> Gathered:
    """Combine the records of all ranks. Collective: all ranks must call it.

    Processes on one machine share a clock. Clocks of different machines are compared after a barrier, with an error of
    about the time of one message.

    Args:
        kept: the visits of which nothing is recomputed.
        segments: how many regions a recompute action replays, the last ones; None for all.
        counted: the bytes of the stages of this ``rank`` of the pipeline.
    """
    with record.device_current():  # NCCL's collectives are on the current device
        dist.barrier(group)
        mine = socket.gethostname(), time.perf_counter(), rank, record.spans(), counted
        processes = all_gather(mine, group)
    replicas: list[list[list[list[Span]]]] = [[] for _ in schedule.ranks]
    stages: dict[int, Stage] = {}
    for host, now, place, steps, stages_of_process in processes:
        ahead = 0.0 if host == processes[0][0] else now - processes[0][1]
        replicas[place].append([[_shifted(span, ahead) for span in step] for step in steps])
        stages = combined(stages, stages_of_process, larger_stage)
    spans: list[Spans] = [list(ranks) for replica in zip(*replicas) for ranks in zip(*replica)]
    in_order = [stages.get(stage, _UNKNOWN) for stage in range(schedule.stages)]
    return Gathered(measured_step(schedule, kept, segments, in_order, spans), spans)


def _shifted(span: Span, seconds: float) -> Span:
    action, *times = span.action, span.due_seconds, span.start_seconds, span.end_seconds
    return Span(action, *(time - seconds for time in times))


# replicas of a pipeline, whose micro-batches may have other sizes: one plan is for the most bytes of any --------------


def combined(
    first: Mapping[_Key, _Value], other: Mapping[_Key, _Value], larger: Callable[[_Value, _Value], _Value]
) -> dict[_Key, _Value]:
    """What two processes have: of what both have, the ``larger``."""
    both = {key: larger(value, other[key]) for key, value in first.items() if key in other}
    return {**first, **other, **both}


def larger_level(first: Level, other: Level) -> Level:
    """The levels of an action that two processes ran: each number is the larger one."""
    places = [[(piece.block, piece.is_replay) for piece in level.pieces] for level in (first, other)]
    pairs = zip(first.pieces, other.pieces) if places[0] == places[1] else ()
    pieces = (Piece(*one[:2], *map(max, one[2:], two[2:])) for one, two in pairs)
    highest, left, entered = map(max, first[:3], other[:3])
    return Level(highest, left, entered, tuple(pieces))


def larger_stage(first: Stage, other: Stage) -> Stage:
    """A stage that takes as much as either, whatever becomes of its blocks."""
    if len(first.blocks) != len(other.blocks):  # no plan is for both: a forward of the other will say so
        return first
    before, *blocks, after = map(_larger_block, first.parts, other.parts)
    return replace(first, blocks=tuple(blocks), before=before, after=after)


def _larger_block(first: Block, other: Block) -> Block:
    seconds = max(first.recompute_seconds, other.recompute_seconds)
    boundary, freed = max(first.boundary_bytes, other.boundary_bytes), max(first.freed_bytes, other.freed_bytes)
    larger = replace(first, recompute_seconds=seconds, saved_bytes=boundary + freed, boundary_bytes=boundary)
    if first.moved_bytes is None or other.moved_bytes is None:
        return larger
    moved = max(first.moved_bytes, other.moved_bytes)
    stays = max(first.saved_bytes - first.moved_bytes, other.saved_bytes - other.moved_bytes)
    return replace(larger, saved_bytes=max(larger.saved_bytes, moved + stays), moved_bytes=moved)
