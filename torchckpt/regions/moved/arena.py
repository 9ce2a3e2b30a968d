"""Arena: memory of the host for what one device sends there, pinned once and handed out in pieces.

A copy to the host writes a piece, and a copy back reads it. Nobody asks on the host whether that has run: the host is a
step ahead of the device, so the arena would get twice as large. A piece comes with the event of the last read of it,
for which the next write waits.

torch rounds pinned memory up to powers of two, and pinning takes milliseconds. So the arena pins chunks of such sizes,
and keeps them. When no piece is in use, as between two steps, all chunks are empty again: then pieces may have other
sizes.
"""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchckpt.errors import CheckpointError

__all__ = ["Arena", "Piece"]

_CHUNK_BYTES = 2**26
_STEP_BYTES = 512


class Piece(NamedTuple):
    bytes: Tensor
    """At least as many as were asked for."""
    read: torch.Event | None
    """When what was there before has been read."""


@dataclass
class _Chunk:
    room: Tensor
    used: int = 0


class Arena:
    """The memory of one device on the host. That of the CPU is not pinned.

    ``bytes`` is all that it has, ``used_bytes`` what is handed out, ``peak_bytes`` the most that was.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: list[_Chunk] = []
        self._free: dict[int, deque[Piece]] = {}
        """By size: pieces that were given back since all chunks were empty, the oldest first."""
        self._returned: deque[Piece] = deque()
        self._read: torch.Event | None = None
        self._read_before: torch.Event | None = None
        """The last read of what the chunks had before they were empty."""
        self.bytes = self.used_bytes = self.peak_bytes = 0

    def take(self, size: int) -> Piece:
        """A piece of ``size`` bytes."""
        self._settle()
        size = -(-size // _STEP_BYTES) * _STEP_BYTES
        known = self._free.get(size)
        piece = known.popleft() if known else Piece(self._cut(size), self._read_before)
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return piece

    def give(self, room: Tensor, read: torch.Event | None = None) -> None:
        """Take the bytes of a piece back, which are read until ``read``; None: nobody reads them. Any thread may call
        this, also during ``take``."""
        self._returned.append(Piece(room, read))

    def reserve(self, size: int) -> None:
        """Pin memory until there are ``size`` bytes.

        Raises:
            CheckpointError: the host has not as many.
        """
        while self.bytes < size:
            self._pin(1 << (size - self.bytes).bit_length() - 1)

    def _settle(self) -> None:
        while self._returned:
            piece = self._returned.popleft()
            self._free.setdefault(piece.bytes.numel(), deque()).append(piece)
            self.used_bytes -= piece.bytes.numel()
            self._read = piece.read or self._read
        if not self.used_bytes:
            self._free.clear()
            self._read_before = self._read
            for chunk in self._chunks:
                chunk.used = 0

    def _cut(self, size: int) -> Tensor:
        chunk = next((each for each in self._chunks if each.used + size <= each.room.numel()), None)
        if chunk is None:
            chunk = self._pin(1 << (size - 1).bit_length())
        start, chunk.used = chunk.used, chunk.used + size
        return chunk.room[start : chunk.used]

    def _pin(self, size: int) -> _Chunk:
        size = max(size, _CHUNK_BYTES)
        is_pinned = self._device.type != "cpu"
        try:
            room = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        except RuntimeError as error:
            raise CheckpointError(
                f"the host has no pinned memory for what {self._device} sends there\n"
                f"  received: {str(error).splitlines()[0]}; {size:,} bytes were wanted, beside {self.bytes:,} bytes\n"
                '  works:    fewer layers, offload_layers(model, "layers.*", every=2); or a higher limit, ulimit -l'
            ) from error
        self._chunks.append(_Chunk(room))
        self.bytes += size
        return self._chunks[-1]
