"""The simulator: what a simulated device can be asked and told beside what any device can."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

__all__ = ["Counts", "Ran", "Rates", "Simulator"]

_TIMEOUT_SECONDS = 60.0


class Counts(NamedTuple):
    """Operators since the last reset."""

    queued: int
    synchronous: dict[str, int]  # by name: those that could not be queued, and were waited for
    waits: int  # of the host, for a stream, an event or a device
    pins: int  # allocations of pinned memory


class Ran(NamedTuple):
    """An operator or a copy, and when it ran."""

    device: int
    stream: int  # 0: the default stream
    operator: str
    start_seconds: float  # since the record began
    end_seconds: float


class Rates(NamedTuple):
    """What a device and its links do in a second; 0: no limit."""

    flops_per_second: float = 0.0
    bytes_per_second: float = 0.0
    seconds_per_operator: float = 0.0
    link_bytes_per_second: float = 0.0
    seconds_per_copy: float = 0.0


class Simulator:
    """All devices of the process. ``tests.device.load()`` returns it."""

    def __init__(self, native: Any) -> None:
        self._native = native

    # what was done ----------------------------------------------------------------------------------------------------

    def counts(self) -> Counts:
        return Counts(*self._native.counts())

    def reset_counts(self) -> None:
        self._native.reset_counts()

    @contextmanager
    def record(self) -> Iterator[list[Ran]]:
        """A list that holds, after the block, what ran in it, in the order of the starts."""
        ran: list[Ran] = []
        self.synchronize()
        self._native.start_record()
        try:
            yield ran
            self.synchronize()
        finally:
            ran.extend(Ran(*entry) for entry in self._native.stop_record())

    def doing(self) -> str:
        """A line for each stream that has work: what it runs, or which event it waits for."""
        return str(self._native.described())

    # waiting ----------------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait for all devices. Raises what failed on them."""
        for device in range(self._native.device_count()):
            torch.accelerator.synchronize(device)

    def check(self) -> None:
        """Raise what has failed so far, without waiting."""
        self._native.raise_faults()

    @contextmanager
    def timeout(self, seconds: float) -> Iterator[None]:
        """The host and streams wait no longer than this for a stream or an event, and say then who waits for what."""
        before = self._native.timeout()
        self._native.set_timeout(seconds)
        try:
            yield
        finally:
            self._native.set_timeout(before)

    @contextmanager
    def held(self, stream: torch.Stream | None = None) -> Iterator[None]:
        """Inside, ``stream`` goes no further than where it is now; default: the current one. To be sure who is late."""
        stream = stream or torch.accelerator.current_stream()
        mark = self._native.hold(stream.device_index, stream.stream_id)
        try:
            yield
        finally:
            mark.complete()

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Inside, work is queued only; then all devices begin at one moment. So no stream is late because the host was.

        What waits for a device inside, waits until the timeout.
        """
        gate = torch.Stream("sim:0")
        with self.held(gate):
            for device in range(self._native.device_count()):
                torch.accelerator.current_stream(device).wait_stream(gate)
            yield

    # time -------------------------------------------------------------------------------------------------------------

    @contextmanager
    def delays(self, seed: int, most_seconds: float = 0.002, share: float = 0.5) -> Iterator[None]:
        """A ``share`` of the operators starts late, by up to ``most_seconds``; which ones follows from ``seed``."""
        self._native.set_delays(seed, most_seconds, share)
        try:
            yield
            self.synchronize()
        finally:
            self._native.set_delays(0, 0.0, 0.0)

    @contextmanager
    def durations(self, rates: Rates | None = None, seconds: Mapping[str, float] | None = None) -> Iterator[None]:
        """Operators take as long as on a device of such rates; those named in ``seconds`` as long as that says.

        What has no duration takes no time of the device, however long the CPU needs: see :meth:`lateness_seconds`.
        """
        rates = rates or Rates()
        self.synchronize()
        self._native.set_rates(*rates)
        for name, duration in (seconds or {}).items():
            self._native.set_seconds(name, duration)
        self._native.reset_lateness()
        try:
            yield
            self.synchronize()
        finally:
            self._native.set_rates(*Rates())
            for name in seconds or {}:
                self._native.set_seconds(name, -1.0)

    def lateness_seconds(self) -> float:
        """How far a stream was behind the time that ``durations`` gave it, at most: the machine was too slow for it."""
        return float(self._native.most_lateness())

    def reset(self) -> None:
        """As after the start: no delays, no durations, no counts, and nothing that failed."""
        self._native.set_delays(0, 0.0, 0.0)
        self._native.set_rates(*Rates())
        self._native.set_timeout(_TIMEOUT_SECONDS)
        self._native.reset_counts()
