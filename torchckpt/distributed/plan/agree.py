"""Agree: what all processes of a job know of each other."""
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from torchckpt.errors import ScheduleError
from torchckpt.model.plan import PipelinePlan

__all__ = ["check_the_same", "digest_of", "of_all", "of_the_first"]


def of_all(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Collective: what each process said, the same list on each."""
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, mine, group=group)
    return said


def of_the_first(mine: Any) -> Any:
    """Collective: what the first process said."""
    said = [mine]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def digest_of(plan: PipelinePlan) -> str:
    return hashlib.sha256(plan.to_json().encode()).hexdigest()[:16]


def check_the_same(what: str, said: Sequence[str]) -> None:
    """Raise ``ScheduleError`` on every rank unless all said the same."""
    if len(set(said)) > 1:
        other = next(at for at, one in enumerate(said) if one != said[0])
        raise ScheduleError(
            f"all ranks have the same {what}\n"
            f"  received: {said[0]} on rank 0, {said[other]} on rank {other}\n"
            f"  works:    recompute_ahead() with the same arguments on every rank"
        )
