"""Meeting: what ranks tell each other, and a collective call that a rank does not make.

A collective that one rank alone enters ends with the timeout of its group, and names nothing. So ranks first say in
turns which call they make. Nothing of this is in a step.
"""
from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

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
from torchckpt.planning import Action, Block, Kind, Stage
from torchckpt.planning.plan import PipelinePlan
from torchckpt.planning.plan.run.fit_measured import Fitted
from torchckpt.planning.step.measured import Span
from torchckpt.planning.step.memory import Level, Piece
from torchckpt.ranks.turns import Absent, told_by_all

__all__ = ["all_gather", "broadcast", "check_the_same", "meeting", "none_failed", "read", "together", "written"]


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
