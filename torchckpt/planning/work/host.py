"""Host: the memory beside a device to which blocks are sent away, and the link to it."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torchckpt.errors import Fault, brief, called, check, raise_fault
from torchckpt.planning.budget import Bytes, read, trouble

__all__ = ["Host"]

_WORKS = 'Host("200GiB", out="25GB", back="25GB")'


@dataclass(frozen=True)
class Host:
    """Host memory of the ranks of a pipeline, and the link of each rank to it.

    Both directions have an engine of their own, which copies one block after the other.

    >>> Host("200GiB", out="25GB").back_rate
    25000000000.0

    Args:
        bytes: of a rank, or a list with one for each: a number, or a size such as ``"200GiB"``.
        out: bytes a second to the host, with all ranks copying: a number, or a size such as ``"25GB"``.
        back: bytes a second from the host. Default: as ``out``.
        half_duplex: one engine copies both ways. Default: False.
        drag: the seconds of compute that a second of copying takes from the rank, since both use its memory; on most
            devices 0.02 to 0.05. Default: 0.

    Raises:
        ArgumentError: an amount is no size, is not above zero, or is a share.
    """

    bytes: Bytes
    out: str | float
    back: str | float | None = None
    half_duplex: bool = False
    drag: float = 0.0

    def __post_init__(self) -> None:
        with called("Host()"):
            check(list(self._faults()))

    @cached_property
    def out_rate(self) -> float:
        """Bytes a second to the host."""
        return _rate(self.out) or 0.0

    @cached_property
    def back_rate(self) -> float:
        """Bytes a second from the host."""
        return self.out_rate if self.back is None else _rate(self.back) or 0.0

    def bytes_of(self, ranks: int) -> tuple[float, ...]:
        """The host memory of each rank.

        Raises:
            ArgumentError: a list has another length.
        """
        amounts = [_amount(written) or 0.0 for written in self._listed]
        if isinstance(self.bytes, Sequence) and not isinstance(self.bytes, str):
            if len(amounts) != ranks:
                rule = f"the host's bytes are neither one for every rank nor a list of {ranks}"
                raise_fault(Fault(rule, f"{len(amounts)} amounts", f"{_WORKS}, or a list with one for each rank"))
            return tuple(amounts)
        return tuple(amounts * ranks)

    @property
    def _listed(self) -> Sequence[object]:
        is_list = isinstance(self.bytes, Sequence) and not isinstance(self.bytes, str)
        return list(self.bytes) if is_list else [self.bytes]  # type: ignore[arg-type]  # narrowed by is_list

    def _faults(self) -> Iterator[Fault]:
        for written in self._listed or [self.bytes]:
            if _amount(written) is None:
                rule = 'the bytes of a host are not a number above 0, or a size such as "200GiB"'
                yield Fault(rule, f"bytes={trouble(written)}", _WORKS)
        for name, rate in (("out", self.out), ("back", self.back)):
            if not (name == "back" and rate is None) and _rate(rate) is None:
                rule = 'the link to a host is not a number of bytes a second above 0, or a size such as "25GB"'
                yield Fault(rule, f"{name}={brief(rate)}", _WORKS)
        if not (isinstance(self.drag, (int, float)) and 0 <= self.drag < math.inf):
            rule = "the drag of a host is not a number of seconds >= 0 for each second of copying"
            yield Fault(rule, f"drag={brief(self.drag)}", "drag=0.02")


def _amount(written: object) -> float | None:
    amount = read(written)
    return None if amount is None or amount.is_share else float(amount.number)


def _rate(written: object) -> float | None:
    """Bytes a second; a number may be below 1, as a plan on paper may count in activations of a block."""
    if isinstance(written, (int, float)) and not isinstance(written, bool):
        return float(written) if 0 < written < math.inf else None
    return _amount(written)
