"""Arena: memory of the host for what one device sends there, pinned once and handed out in pieces.

A copy to the host writes a piece, and a copy back reads it. Nobody asks on the host whether that has run: the host is a
step ahead of the device, so the arena would get twice as large. A piece comes with the event of the last read of it,
for which the next write waits.

torch rounds pinned memory up to powers of two, and pinning takes milliseconds. So chunks of such sizes are pinned, and
kept. When no piece is in use, as between two steps, they are empty again: then pieces may have other sizes.
"""
from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from torchckpt.errors import CheckpointError, Fault

__all__ = ["Arena", "Piece"]

_CHUNK_BYTES = 2**26
_STEP_BYTES = 512


class Piece(NamedTuple):
    bytes: Tensor
    """At least as many as were asked for."""
    read: torch.Event | None
    """When what was there before has been read."""


class Arena:
    """The memory of one device on the host; that of the CPU is not pinned. ``bytes`` is all that it has, ``used_bytes``
    what is handed out, ``peak_bytes`` the most that was."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: list[Tensor] = []
        self._rests: list[Tensor] = []
        """Of each chunk, what was not handed out since it was empty."""
        self._free: dict[int, deque[Piece]] = {}
        """By size: pieces that were given back since then, the oldest first."""
        self._returned: deque[Piece] = deque()
        self.last_read: torch.Event | None = None
        """The copy back that was queued last: the others end before it."""
        self._read_before: torch.Event | None = None
        """The last read of what the chunks had before they were empty."""
        self.bytes = self.used_bytes = self.peak_bytes = 0
        self._lock = threading.Lock()
        """Held by who takes or pins: a link is measured in one thread while regions of another move."""

    def take(self, size: int) -> Piece:
        """A piece of ``size`` bytes."""
        size = -(-size // _STEP_BYTES) * _STEP_BYTES
        with self._lock:
            self._settle()
            known = self._free.get(size)
            piece = known.popleft() if known else Piece(self._cut(size), self._read_before)
            self.used_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return piece

    def give(self, room: Tensor, read: torch.Event | None = None) -> None:
        """Take the bytes of a piece back, which are read until ``read``; None: nobody reads them. Any thread may call
        this, also during ``take``."""
        self._returned.append(Piece(room, read))

    def begin_peak(self) -> None:
        """From now on ``peak_bytes`` is that of what follows."""
        with self._lock:
            self._settle()
            self.peak_bytes = self.used_bytes

    def reserve(self, size: int) -> None:
        """Pin memory until there are ``size`` bytes. Raises ``CheckpointError`` if the host has not as many."""
        with self._lock:
            while self.bytes < size:
                self._pin(1 << (size - self.bytes).bit_length() - 1)

    def _settle(self) -> None:
        while self._returned:
            piece = self._returned.popleft()
            self._free.setdefault(piece.bytes.numel(), deque()).append(piece)
            self.used_bytes -= piece.bytes.numel()
        if not self.used_bytes:
            self._free.clear()
            self._rests, self._read_before = list(self._chunks), self.last_read

    def _cut(self, size: int) -> Tensor:
        for place, rest in enumerate(self._rests):
            if rest.numel() >= size:
                self._rests[place] = rest[size:]
                return rest[:size]
        self._pin(1 << (size - 1).bit_length())
        return self._cut(size)

    def _pin(self, size: int) -> None:
        size = max(size, _CHUNK_BYTES)
        try:
            chunk = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._device.type != "cpu")
        except RuntimeError as error:
            rule = f"the host has no pinned memory for what {self._device} sends there"
            received = f"{str(error).splitlines()[0]}; {size:,} bytes were wanted, beside {self.bytes:,} bytes"
            fewer = 'offload_layers(model, "layers.*", every=2)'
            works = f"a smaller host=; or fewer layers, {fewer}; or a higher limit, ulimit -l"
            raise CheckpointError(str(Fault(rule, received, works))) from error
        self._chunks.append(chunk)
        self._rests.append(chunk)
        self.bytes += size
