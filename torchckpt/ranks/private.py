"""Private: the private names of torch's that tell of process groups."""
from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

__all__ = ["begun_collectives", "store_of", "timeout_of"]


def store_of(group: dist.ProcessGroup) -> Store | None:
    """The store in which the ranks of ``group`` met to make it; None of a backend that needs none."""
    try:
        store: Store | None = group.get_group_store()
    except (AttributeError, RuntimeError):
        return None
    return store


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long a collective on ``device`` may take. Ends when ``torch.distributed`` has a public name for it."""
    try:
        timeout: timedelta = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout
    return timeout


def begun_collectives() -> dict[dist.ProcessGroup, int]:
    """How many collectives and messages this process has begun in each group of several ranks, by compiled code, too.
    No public form: ``torch/distributed/distributed_c10d.py`` has the groups."""
    numbers: dict[dist.ProcessGroup, int] = {}
    for group in dist.distributed_c10d._world.pg_map:
        number: Any = getattr(group, "_get_sequence_number_for_group", None)
        with suppress(RuntimeError):  # of a backend that does not count
            numbers |= {group: number()} if number is not None and group.size() > 1 else {}
    return numbers
