"""Link: how fast a device copies to its host and back, and what that takes from its compute."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchckpt.errors import CheckpointError, Fault, without_traceback
from torchckpt.regions.devices import Clock, Stamp, on
from torchckpt.regions.moved.copies import Piece, copies_of

__all__ = ["MeasuredLink", "measured_link"]

_ROUNDS = 5
"""The first is warm-up."""
_LEAST_BYTES, _MOST_BYTES, _SHORTEST_SECONDS = 2**18, 2**26, 1e-9

Meeting: TypeAlias = "Callable[[CheckpointError | None], object]"


class MeasuredLink(NamedTuple):
    out: float
    """Bytes a second to the host, while a copy back runs beside it."""
    back: float
    drag: float
    """The seconds of compute that a second of copying takes."""


def measured_link(device: torch.device, size: int, meet: Meeting) -> MeasuredLink:
    """Copy ``size`` bytes both ways at once, beside compute that reads and writes as many.

    Args:
        device: an accelerator.
        size: the bytes that it may take here and on the host, such as those of the largest region.
        meet: called before each round: a barrier, so that all devices which share a link copy at the same time. At
            first with the error of a device that has no memory for it, which it may raise on all: others would wait.
    """
    size = min(max(size // 3, _LEAST_BYTES), _MOST_BYTES)
    arena, failure = copies_of(device).arena, None
    pieces: list[Piece] = []
    try:
        try:
            here = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(3)]
            pieces.extend(arena.take(size) for _ in range(2))  # the first stands there if the second cannot be had
        except CheckpointError as error:
            failure = without_traceback(error)
        except torch.OutOfMemoryError as error:
            rule = f"{device} has no memory left to measure its link to the host"
            received = f"{str(error).splitlines()[0]}; three times {size:,} bytes were wanted"
            failure = CheckpointError(str(Fault(rule, received, "the same without host=, or smaller batches")))
        meet(failure)
        if failure is not None:
            raise without_traceback(failure)
        return _measured(device, here, [piece.bytes[:size] for piece in pieces], meet)
    finally:
        for piece in pieces:
            arena.give(piece.bytes)


def _measured(device: torch.device, here: Sequence[Tensor], host: Sequence[Tensor], meet: Meeting) -> MeasuredLink:
    copies, clock, size, rounds = copies_of(device), Clock(device), host[0].numel(), []
    for _ in range(_ROUNDS):
        torch.accelerator.synchronize(device)
        meet(None)
        alone = _timed(clock, None, here[2], here[2])
        torch.accelerator.synchronize(device)
        rounds.append([
            _timed(clock, copies.out, host[0], here[0]), _timed(clock, copies.back, here[1], host[1]),
            _timed(clock, None, here[2], here[2]), alone,
        ])
    seconds = clock.reader()
    spans = [[seconds(end) - seconds(start) for start, end in each] for each in rounds[1:]]
    out_seconds, back_seconds, beside, without = (max(median(each), _SHORTEST_SECONDS) for each in zip(*spans))
    copied = min(beside, out_seconds) + min(beside, back_seconds)  # what of the copies ran beside the compute
    return MeasuredLink(size / out_seconds, size / back_seconds, max(0.0, beside - without) / copied)


def _timed(clock: Clock, stream: torch.Stream | None, target: Tensor, source: Tensor) -> tuple[Stamp, Stamp]:
    """Copy on ``stream``, or compute where there is none."""
    with on(stream):
        start = clock.stamp()
        if stream is None:
            target.add_(source)
        else:
            target.copy_(source, non_blocking=True)
        return start, clock.stamp()
