"""Copies: between one device and the host, each way on a stream of its own, and all that waits for them.

``compute`` is the stream that is current at that moment. It is asked each time, since users change it.

    after the forward of a region     compute ─► out      [1] what it has saved is made
    before a piece is written again   back ─► out         [2] the copy that reads it has ended
    release                           out ─► compute      [3] the memory goes back to compute's pool, in its order
    issue                             compute ─► back     [4] the memory of the targets is free
                                      out ─► back         [5] it is sent, also if another stream has waited for [3]
    unpack                            back ─► compute     [6] it has come back
    death, if nobody has unpacked it  back ─► compute     [7] nobody writes the memory, which goes back

A tensor that is recorded on another stream (``record_stream``) is free whenever the host happens to ask, and a peak
could not be planned. So only one is: what a backward reads on another stream than that of ``issue``. By [3] and [4],
all others are freed and made in the order of the calls, whatever the copies do.

What a device sends to the host lies in its arena: memory of the host, pinned once and handed out in pieces. A copy to
the host writes a piece, and a copy back reads it. Nobody asks on the host whether that has run: the host is a step
ahead of the device, so the arena would get twice as large. A piece comes with the event of the last read of it, for
which the next write waits.

torch rounds pinned memory up to powers of two, and pinning takes milliseconds. So chunks of such sizes are pinned, and
kept. When no piece is in use, as between two steps, they are empty again: then pieces may have other sizes.
"""
from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchckpt.errors import CheckpointError, Fault
from torchckpt.regions.devices import Clock, Stamp, accelerator_type, mark, on, wait_for
from torchckpt.regions.private import storage_key

__all__ = ["Arena", "Bytes", "Copies", "Piece", "copies_of", "goes_from"]

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


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def goes_from(device: torch.device) -> bool:
    """Whether tensors of ``device`` go to the host. MPS shares its memory, and so does the CPU."""
    return device.type == accelerator_type() != "mps"


class Bytes:
    """The bytes of one storage: on the device, on the host, or on their way."""

    def __init__(self, tensor: Tensor, copies: Copies, streams: Iterable[torch.Stream]) -> None:
        self.piece: Piece | None = None
        """Its place on the host, from ``send`` on."""
        self.sent: torch.Event | None = None
        """The end of the copy to the host."""
        self.came: torch.Event | None = None
        """The end of the copy back."""
        self.is_waited_for = True
        """Whether ``streams`` wait for the copy back."""
        self.is_away = self.is_back = self.is_output = False
        self.copies, self.streams = copies, tuple(streams)
        """The streams to whose pools the memory goes back."""
        self.memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        """All of the storage; nothing while it is away."""
        self.size, self._address = self.memory.numel(), self.memory.data_ptr()
        self.slots: list[weakref.ref[Any]] = []
        """Those of the tensors that are there."""
        self.owner: weakref.ref[Any] | None = None
        """The region that releases and issues it: the last that has saved it, whose backward needs it first."""

    @property
    def is_resized(self) -> bool:
        """Whether somebody has given the storage another size, or other memory, since it was saved."""
        storage = self.memory.untyped_storage()
        is_as_saved = (storage.nbytes(), storage.data_ptr()) == (self.size, self._address)
        return not (self.is_away or self.is_back or is_as_saved)

    def let_go(self) -> None:
        """The memory on the device goes back."""
        for stream in self.streams:
            self.copies.hold(stream, self.sent)  # [3]
        self.memory, self.is_away = _NOTHING, True

    def stay(self) -> None:
        """What is on the host is needed no more, but for a copy back that is on its way."""
        piece, self.piece = self.piece, None
        if piece is not None:
            self.copies.arena.give(piece.bytes, self.came)

    def wait(self) -> None:
        """The current stream may read ``memory`` from now on."""
        current = self.copies.current()
        self.copies.hold(current, self.came)  # [6]
        if current in self.streams:
            self.is_waited_for = True
        elif current is not None and self.is_back:
            self.memory.record_stream(current)

    def __del__(self) -> None:
        for stream in () if self.is_waited_for else self.streams:
            wait_for(stream, self.came)  # [7]
        self.stay()


class Copies:
    """The copies of one device. On the CPU there are no streams, and a copy is done when it returns."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.arena = device, Arena(device)
        has_streams = device.type != "cpu"
        self.out: torch.Stream | None = torch.Stream(device) if has_streams else None
        self.back: torch.Stream | None = torch.Stream(device) if has_streams else None
        """The streams of the copies to the host and back."""
        self._known: weakref.WeakValueDictionary[int | None, Bytes] = weakref.WeakValueDictionary()
        """By the key of the storage."""
        self.waits: list[tuple[Stamp, Stamp]] | None = None
        """Where each wait of the compute is noted, with its begin and end; None: nowhere."""
        self.clock = Clock(device)

    def current(self) -> torch.Stream | None:
        """The stream that is current now; None on the CPU."""
        return None if self.out is None else torch.accelerator.current_stream(self.device)

    def known(self, tensor: Tensor) -> Bytes | None:
        """The bytes of its storage, if a region has saved it that has not let go of it."""
        known = self._known.get(storage_key(tensor))
        return None if known is None or known.is_away or known.is_back else known

    def hold(self, compute: torch.Stream | None, event: torch.Event | None) -> None:
        """Let ``compute`` wait for the end of a copy."""
        if self.waits is None or event is None:
            wait_for(compute, event)
        else:
            start = self.clock.stamp(compute)
            wait_for(compute, event)
            self.waits.append((start, self.clock.stamp(compute)))

    def waited_seconds(self) -> float:
        """The seconds of the waits that were noted. Waits for the device."""
        seconds = self.clock.reader()
        return sum(seconds(end) - seconds(start) for start, end in self.waits or ())

    def bytes_of(self, tensor: Tensor, streams: Iterable[torch.Stream]) -> Bytes:
        """The bytes of its storage, from now on known. ``streams`` are those that a region has used it on."""
        made = self._known[storage_key(tensor)] = Bytes(tensor, self, streams)
        return made

    def send(self, sources: Sequence[Bytes]) -> None:
        """Queue their copies to the host, in this order. If that fails, all stay, and the pieces are given back."""
        pieces: list[Piece] = []
        try:
            for each in sources:
                pieces.append(self.arena.take(each.size))
            ended = self._queue(sources, pieces)
        except BaseException:
            for piece in pieces:
                self.arena.give(piece.bytes, piece.read)
            raise
        for each, piece in zip(sources, pieces):
            each.piece, each.sent = piece, ended

    def _queue(self, sources: Sequence[Bytes], pieces: Sequence[Piece]) -> torch.Event | None:
        """Queue copies to the host; their end."""
        for stream in dict.fromkeys(stream for each in sources for stream in each.streams):
            wait_for(self.out, mark(stream))  # [1]
        with on(self.out):
            for each, piece in zip(sources, pieces):
                wait_for(self.out, piece.read)  # [2]
                piece.bytes[: each.size].copy_(each.memory, non_blocking=True)
        return mark(self.out)

    def fetch(self, targets: Iterable[Bytes]) -> None:
        """Queue the copies back of those that are away, in this order."""
        away = [(each, each.piece) for each in targets if each.is_away and each.piece is not None]
        if not away:
            return
        memories = [torch.empty(each.size, dtype=torch.uint8, device=self.device) for each, _ in away]
        compute = self.current()
        wait_for(self.back, mark(compute))  # [4]
        with on(self.back):
            for (each, piece), memory in zip(away, memories):
                wait_for(self.back, each.sent)  # [5]
                memory.copy_(piece.bytes[: each.size], non_blocking=True)
                each.came, each.is_waited_for = mark(self.back), False
                each.memory, each.streams = memory, () if compute is None else (compute,)
                each.is_away, each.is_back = False, True
                self.arena.last_read = each.came


@functools.cache
def copies_of(device: torch.device) -> Copies:
    """Those of ``device``, as long as the process."""
    return Copies(device)
