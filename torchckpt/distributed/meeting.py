"""Meeting: what ranks tell each other, and a collective call that a rank does not make.

A collective that one rank alone enters ends with the timeout of its group, and names nothing. So ranks first say in the
store of the group which call they make. They take turns, numbered on each rank; a turn is decided once, by whoever is
first: "met" by the rank that sees all others, "missed" by one that has waited too long. Late ranks pass over a missed
turn, and so meet in the next one::

    rank 0   turn/0 = 1   1/0 = report()   waits ... 1/verdict = missed: error    turn/0 = 2   2/0 = report()   met
    rank 1                                           (passes over turn 1)   turn/1 = 2   2/1 = report()         met

The last rank to leave a turn clears it. Nothing of this is in a step.
"""
from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchckpt.distributed.message import read, written
from torchckpt.distributed.private import store_of, timeout_of
from torchckpt.errors import CheckpointError, ScheduleError

__all__ = ["all_gather", "broadcast", "check_the_same", "meeting", "together"]

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


_WARNED_AFTER = timedelta(seconds=10)
_MET, _MISSED = "met", "missed"


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
        raise _refusal(call, f"{type(error).__name__}: {error}") from error


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
        raise ScheduleError(
            f"the ranks could not {purpose}: rank {dist.get_rank()} did not hear from all others\n"
            f"  received: {type(error).__name__}: {error}\n"
            "  works:    the same steps on every rank; another one failed before, and says at what itself"
        ) from error


def check_the_same(what: str, told: Sequence[tuple[str, str]]) -> None:
    """Raise ``ScheduleError`` unless all ranks have told the same key. Call it on all ranks.

    Args:
        what: the name of what has to be the same, for the error.
        told: the key of each rank, and how an error shows it.
    """
    key, shown = told[0]
    for rank, (other, shown_there) in enumerate(told):
        if other != key:
            raise ScheduleError(
                f"the ranks do not have the same {what}\n"
                f"  received: {shown} on rank 0, {shown_there} on rank {rank}\n"
                f"  works:    recompute_ahead() with the same arguments on every rank"
            )


def _meet(call: str, group: dist.ProcessGroup, device: torch.device) -> None:
    store, patience = store_of(group), timeout_of(group, device) / 2
    if store is None:
        return
    turns = _Turns(PrefixStore("torchckpt/meeting", store), group.rank(), group.size())
    turn = turns.entered(call)
    warned = min(_WARNED_AFTER, patience / 2)
    if not turns.wait(turn, warned):
        text = f"schedule.{call} waits for {_ranks(turns.absent(turn))}: it is collective, every rank is to call it"
        warnings.warn(text, stacklevel=6)
        turns.wait(turn, patience - warned)
    absent = turns.absent(turn)
    if turns.decided(turn, _MISSED if absent else _MET) == _MISSED:
        late = f"no such call on {_ranks(absent)}" if absent else "the last call after another rank had given up"
        raise _refusal(call, f"{call} on rank {group.rank()}, {late} within {patience.total_seconds():g} s")
    calls = turns.left(turn)
    if len(set(calls)) > 1:
        raise _refusal(call, ", ".join(f"{other} on rank {rank}" for rank, other in enumerate(calls)))


class _Turns:
    """The turns of one rank, in the ``store`` of its group."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def entered(self, call: str) -> int:
        """The number of the turn; the first that is not missed."""
        while True:
            turn: int = self._store.add(f"turn/{self._rank}", 1)
            if not self._store.check([f"{turn}/verdict"]):
                self._store.set(f"{turn}/{self._rank}", call)
                return turn

    def wait(self, turn: int, time: timedelta) -> bool:
        """Whether all ranks came, after at most so much time."""
        try:
            self._store.wait(self._keys(turn), time)
        except RuntimeError:  # the time is over; a store that is lost raises again
            return not self.absent(turn)
        return True

    def absent(self, turn: int) -> list[int]:
        return [rank for rank, key in enumerate(self._keys(turn)) if not self._store.check([key])]

    def decided(self, turn: int, verdict: str) -> str:
        """The verdict that came first."""
        first: bytes = self._store.compare_set(f"{turn}/verdict", "", verdict)
        return first.decode()

    def left(self, turn: int) -> list[str]:
        """Leave a turn; the call that each rank made in it."""
        calls = [self._store.get(key).decode() for key in self._keys(turn)]
        is_last = self._store.add(f"{turn}/left", 1) == self._size
        while is_last and self._store.check([f"{turn}/verdict"]):  # nobody reads this turn, or one before it, again
            for key in (*self._keys(turn), f"{turn}/left", f"{turn}/verdict"):
                self._store.delete_key(key)
            turn -= 1
        return calls

    def _keys(self, turn: int) -> list[str]:
        return [f"{turn}/{rank}" for rank in range(self._size)]


def _ranks(listed: Sequence[int]) -> str:
    return f"rank{'s' * (len(listed) > 1)} {', '.join(map(str, listed))}"


def _refusal(call: str, received: str) -> ScheduleError:
    name = call.removesuffix("()")
    return ScheduleError(
        f"schedule.{call} did not complete on every rank of the pipeline: it is collective\n"
        f"  received: {received}\n"
        f"  works:    {name} = schedule.{call} on every rank; then, on one: print({name})"
    )
