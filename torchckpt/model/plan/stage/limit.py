"""Limit: convert the memory budget that a user wrote into bytes for every rank."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TypeAlias

from torchckpt.errors import BudgetInfeasible, Fault, raise_faults
from torchckpt.model.amount import WORKS, Budget, enough, read_budgets, whole

__all__ = ["Bytes", "DeviceMemory", "Limit", "bytes_per_rank", "without_static"]


@dataclass(frozen=True)
class DeviceMemory:
    """All memory of each rank: its budget is what parameters, gradients and optimizer state leave of it."""

    total_bytes: float


Bytes: TypeAlias = "Budget | Sequence[Budget]"
"""Of every rank, or a list with one for each: bytes, a size such as ``"60GB"``, or ``"50%"`` of the peak of the rank
that holds most when all is kept."""

Limit: TypeAlias = "Bytes | DeviceMemory"
"""Or what devices have in all."""


def without_static(caller: str, memory: DeviceMemory, static_bytes: Sequence[float]) -> tuple[float, ...]:
    """The bytes of each rank that are left for activations.

    Raises:
        BudgetInfeasible: no bytes are left on some rank.
    """
    most = max(static_bytes)
    if most < memory.total_bytes:
        return tuple(memory.total_bytes - one for one in static_bytes)
    rank = list(static_bytes).index(most)
    raise BudgetInfeasible(
        f"{caller}: a device holds parameters, gradients and optimizer state, and has memory left for activations\n"
        f"  received: {whole(memory.total_bytes)} bytes, of which those take {enough(most)} on rank {rank}\n"
        "  works:    more stages; or state that is sharded over data-parallel ranks, such as optimizer_bytes=12 / 64",
        most,
        None,
        rank,
    )


def bytes_per_rank(caller: str, limit: Bytes, ranks: int, peak_bytes: float) -> tuple[float, ...]:
    """The budget of each rank in bytes.

    >>> bytes_per_rank("plan()", ["50%", "1kB"], 2, 8000.0)
    (4000.0, 1000.0)

    Args:
        peak_bytes: the bytes of a share of 100%.

    Raises:
        ArgumentError: a budget is not a size, is not above zero, is a number below 1, or their number differs from the
            number of ranks.
    """
    if isinstance(limit, (str, Real)):
        amounts = read_budgets(caller, {"budget": limit}) * ranks
    elif isinstance(limit, Sequence) and len(limit) == ranks:
        amounts = read_budgets(caller, {f"budget[{rank}]": one for rank, one in enumerate(limit)})
    else:
        received = f"{len(limit)} budgets" if isinstance(limit, Sequence) else f"budget={limit!r}"
        works = f"{WORKS}, or a list with one for each rank"
        raise_faults(caller, [Fault(f"a budget is one for every rank, or a list of {ranks}", received, works)])
        return ()
    return tuple(float(amount.of(peak_bytes)) for amount in amounts)
