"""Link: how fast a device copies to its host and back, and what that takes from its compute."""
from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from torchckpt.regions.devices import Clock, Stamp, on
from torchckpt.regions.moved.copies import copies_of

__all__ = ["MeasuredLink", "measured_link"]

_ROUNDS = 5
"""The first is warm-up."""
_LEAST_BYTES, _SHORTEST_SECONDS = 2**20, 1e-9


class MeasuredLink(NamedTuple):
    out: float
    """Bytes a second to the host, while a copy back runs beside it."""
    back: float
    drag: float
    """The seconds of compute that a second of copying takes."""


def measured_link(device: torch.device, size: int, wait: Callable[[], object]) -> MeasuredLink:
    """Copy ``size`` bytes both ways at once, beside compute that reads and writes as many.

    Args:
        device: an accelerator.
        size: such as that of the largest region; at least 1 MiB is copied.
        wait: called before each round: a barrier, so that all devices which share a link copy at the same time.
    """
    size = max(size, _LEAST_BYTES)
    copies, clock = copies_of(device), Clock(device)
    here = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(3)]
    pieces = [copies.arena.take(size) for _ in range(2)]
    host = [piece.bytes[:size] for piece in pieces]
    rounds = []
    for _ in range(_ROUNDS):
        torch.accelerator.synchronize(device)
        wait()
        alone = _timed(clock, None, here[2], here[2])
        torch.accelerator.synchronize(device)
        out, back = copies.engines
        rounds.append([
            _timed(clock, out, host[0], here[0]), _timed(clock, back, here[1], host[1]),
            _timed(clock, None, here[2], here[2]), alone,
        ])
    seconds = clock.reader()
    for piece in pieces:
        copies.arena.give(piece.bytes)
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
