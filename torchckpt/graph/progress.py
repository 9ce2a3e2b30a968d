"""Progress: one line on a terminal while a plan takes long, and one line in the log when it is made."""
from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from torchckpt.model.remat.plan import Plan

__all__ = ["LOGGER", "Stopwatch", "Watch", "log"]

LOGGER = logging.getLogger("torchckpt")
_PATIENCE_SECONDS, _BETWEEN_SECONDS = 3.0, 0.2
_WIDTH = 79


def _clock() -> float:
    return time.perf_counter()


class Watch:
    """Counts the seconds of planning, and shows them on stderr from some seconds on, if that is a terminal."""

    def __init__(self) -> None:
        self.planning_seconds = 0.0

    @contextmanager
    def planning(self, operations: int) -> Iterator[Callable[[str], None]]:
        """Time the planning of so many operations. Gives a function that shows what is being done."""
        line = _Line(f"torchckpt plans {operations} operations", sys.stderr)
        try:
            yield line.show
        finally:
            line.remove()
            self.planning_seconds += _clock() - line.start_seconds


class _Line:
    """One line on a terminal, overwritten by each update and erased by ``remove()``. Elsewhere nothing is written."""

    def __init__(self, head: str, stream: TextIO | None) -> None:
        self._head, self._stream = head, stream if stream is not None and stream.isatty() else None
        self.start_seconds = _clock()
        self._shown_seconds: float | None = None

    def show(self, what: str) -> None:
        if self._stream is None:
            return
        now = _clock()
        last = self._shown_seconds
        if now - self.start_seconds >= _PATIENCE_SECONDS and (last is None or now - last >= _BETWEEN_SECONDS):
            text = f"{self._head}: {what}, {now - self.start_seconds:.0f} s"
            self._write(f"\r{text[:_WIDTH]}\x1b[K")
            self._shown_seconds = now

    def remove(self) -> None:
        if self._shown_seconds is not None:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start_seconds = _clock()

    @property
    def seconds(self) -> float:
        return _clock() - self._start_seconds


def log(
    caller: str, what: Any, reason: Callable[[], str], seconds: float, planning_seconds: float, plan: Plan | None
) -> None:
    """Log one line about a trace: seconds to trace and to plan, the reason, and the plan."""
    if not LOGGER.isEnabledFor(logging.INFO):
        return
    planned = "with nothing to differentiate" if plan is None else repr(plan).strip("<>")
    LOGGER.info(
        "%s: %s traced in %.2f s and planned in %.2f s, because of %s. %s",
        caller, type(what).__name__, max(0.0, seconds - planning_seconds), planning_seconds, reason(), planned,
    )
