"""Host: the memory beside a device to which blocks are sent away, the link to it, and when a block goes and comes."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torchckpt.errors import Fault, brief, called, check, raise_fault
from torchckpt.planning.budget import Bytes, read, trouble
from torchckpt.planning.work.block import is_amount, is_number

__all__ = ["Boundary", "Host", "Move"]

_WORKS = 'Host("200GiB", out="25GB", back="25GB")'
_BYTES = 'the bytes of a host are not a number of at least 1, or a size such as "200GiB"'
_LINK = 'the link to a host is not a number of bytes a second above 0, or a size such as "25GB"'

_MOST = 1e30
"""Bytes, and bytes a second: no host has more, and seconds stay numbers."""


@dataclass(frozen=True)
class Host:
    """Host memory of the ranks of a pipeline, and the link of each rank to it.

    Each direction has an engine of its own, which copies one block after the other.

    >>> Host("200GiB", out="25GB").back_rate
    25000000000.0

    Args:
        bytes: of a rank, or a list with one for each: a number, or a size such as ``"200GiB"``.
        out: bytes a second to the host, with all ranks copying: a number, or a size such as ``"25GB"``.
        back: bytes a second from the host. Default: as ``out``.
        half_duplex: one engine copies both ways. Default: False.
        drag: the seconds of compute that a second of copying takes from the rank, as both use the memory of the device;
            0.02 to 0.05 on many. Default: 0.

    Raises:
        ArgumentError: an amount is no size, or is not above zero.
    """

    bytes: Bytes
    out: str | float
    back: str | float | None = None
    half_duplex: bool = False
    drag: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.bytes, list):
            object.__setattr__(self, "bytes", tuple(self.bytes))
        each = self.bytes if isinstance(self.bytes, tuple) else (self.bytes,)
        works = '"200GiB", or a list with one for each rank'
        wrong = [Fault(_BYTES, trouble(amount), works) for amount in each if _size(amount) is None]
        for name, rate in [("out", self.out), *[("back", self.back)] * (self.back is not None)]:
            wrong += [] if _rate(rate) else [Fault(_LINK, f"{name}={trouble(rate)}", _WORKS)]
        if not isinstance(self.half_duplex, bool):
            rule = "half_duplex is not True or False"
            wrong.append(Fault(rule, f"half_duplex={brief(self.half_duplex)}", "half_duplex=True"))
        if not is_amount(self.drag):
            rule = "the drag of a host is not a number of seconds >= 0 for each second of copying"
            wrong.append(Fault(rule, f"drag={brief(self.drag)}", "drag=0.02"))
        with called("Host()"):
            check(wrong)

    @cached_property
    def out_rate(self) -> float:
        """Bytes a second to the host."""
        return _rate(self.out) or 0.0

    @cached_property
    def back_rate(self) -> float:
        """Bytes a second from the host."""
        return self.out_rate if self.back is None else _rate(self.back) or 0.0

    def bytes_of(self, ranks: int) -> tuple[float, ...]:
        """The host memory of each rank. An ArgumentError, if a list has another length."""
        each = self.bytes if isinstance(self.bytes, tuple) else (self.bytes,) * ranks
        if len(each) != ranks:
            rule = f"the bytes of a host are neither one for every rank nor a list of {ranks}"
            works = f"{each[0] if each else 1e9!r}, or a list with one for each rank"
            raise_fault(Fault(rule, f"{len(each)} amounts", works))
        return tuple(_size(amount) or 0.0 for amount in each)


def _size(written: object) -> float | None:
    amount = read(written)
    return None if amount is None or amount.is_share or amount.number > _MOST else float(amount.number)


def _rate(written: object) -> float | None:
    """Bytes a second; a number may be below 1, as a plan on paper may count in activations of a block."""
    if is_number(written):
        return float(written) if 0 < written <= _MOST else None
    return _size(written)


class Boundary(NamedTuple):
    """A place between two pieces of the compute of a rank.

    In a forward of n blocks, 0 is the start of the action, j is before block j, and n is after the last block. In a
    backward n is the start, then j is before the replay and the backward of block j, from n - 1 down to 0. A recompute
    and weight gradients have one boundary, 0, their start.
    """

    action: int
    """The index of an action in the row of the rank, recomputes and weight gradients included."""
    block: int


class Move(NamedTuple):
    """When one block of one visit leaves its device, and when it comes back; by position, not by time.

    Copies run beside the compute, in the order in which they are queued; the copy out, when the forward of the block
    has ended. So a plan says two boundaries of each block that is away and nothing else. At a boundary the compute
    waits for the releases there, in the order of the copies out, and queues the copies back that are issued there,
    before a release or behind it. Then it waits (at the start of an action) for the message, and (in a backward) for
    the copy back of the block that runs next.
    """

    stage: int
    micro_batch: int
    block: int
    release: Boundary
    """After the forward of the block: the compute waits for the end of its copy to the host; then bytes are free."""
    issue: Boundary
    """At or after the release, and at or before the backward of the block: memory is taken for it, and its copy back is
    queued."""
    behind: int = 0
    """How many of the releases at the boundary of its issue come before that. Its own release always does."""
