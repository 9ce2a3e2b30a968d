"""Agreement: exchanges values between all processes of a job, and checks that they are equal."""
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from torchckpt.errors import ScheduleError
from torchckpt.model.plan import PipelinePlan

__all__ = ["all_gather", "broadcast", "check_the_same", "digest_of"]


def all_gather(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values ``mine`` of all processes, in the order of ranks. Collective: all processes must call it."""
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, mine, group=group)
    return said


def broadcast(mine: Any) -> Any:
    """Return the value ``mine`` of rank 0. Collective: all processes must call it."""
    said = [mine]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def digest_of(plan: PipelinePlan) -> str:
    return hashlib.sha256(plan.to_json().encode()).hexdigest()[:16]


def check_the_same(what: str, said: Sequence[str]) -> None:
    """Raise ``ScheduleError`` on every rank unless all entries of ``said``, one for each rank, are equal."""
    if len(set(said)) > 1:
        other = next(rank for rank, value in enumerate(said) if value != said[0])
        raise ScheduleError(
            f"all ranks must have the same {what}\n"
            f"  received: {said[0]} on rank 0, {said[other]} on rank {other}\n"
            f"  works:    recompute_ahead() with the same arguments on every rank"
        )
