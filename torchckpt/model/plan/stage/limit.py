"""Limit: convert the memory budget that a user wrote into bytes for every rank."""
from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TypeAlias

from torchckpt.errors import BudgetInfeasible, Fault, raise_faults
from torchckpt.model.amount import Amount, read, trouble

__all__ = ["Bytes", "DeviceMemory", "Limit", "bytes_per_rank", "without_static"]


@dataclass(frozen=True)
class DeviceMemory:
    """All memory of each rank: its budget is what parameters, gradients and optimizer state leave of it."""

    total_bytes: float


Bytes: TypeAlias = "str | float | Sequence[str | float]"
"""Of every rank, or a list with one for each: bytes, a size such as ``"60GB"``, or ``"50%"`` of the peak of the rank
that holds most when all is kept."""

Limit: TypeAlias = "Bytes | DeviceMemory"
"""Or what devices have in all."""

_WORKS = 'budget="60GB", budget="50%", budget=6e10, or a list with one for each rank'


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
        f"  received: {memory.total_bytes:.12g} bytes, of which those take {most:.12g} on rank {rank}\n"
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
        ArgumentError: a budget is not a size, is not above zero, or their number differs from the number of ranks.
    """
    if isinstance(limit, (str, int, float, Real)):
        raise_faults(caller, _faults("budget", limit))
        return (_bytes(limit, peak_bytes),) * ranks
    if not isinstance(limit, Sequence) or len(limit) != ranks:
        received = f"{len(limit)} budgets" if isinstance(limit, Sequence) else f"budget={limit!r}"
        raise_faults(caller, [Fault(f"a budget is one for every rank, or a list of {ranks}", received, _WORKS)])
    raise_faults(caller, [fault for rank, one in enumerate(limit) for fault in _faults(f"budget[{rank}]", one)])
    return tuple(_bytes(one, peak_bytes) for one in limit)


def _faults(name: str, limit: object) -> list[Fault]:
    if _amount(limit):
        return []
    rule = "a budget is bytes above 0, a size with a unit such as kB, MiB or GB, or a share in percent"
    return [Fault(rule, f"{name}={trouble(limit)}", _WORKS)]


def _amount(limit: object) -> Amount | None:
    amount = read(limit)
    return None if amount is None or amount.number > sys.float_info.max else amount


def _bytes(limit: object, peak_bytes: float) -> float:
    amount = _amount(limit)
    return float(amount.of(peak_bytes)) if amount else 0.0
