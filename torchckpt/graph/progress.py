"""Progress: a line on a terminal while a trace or a plan takes long, or lines in the log; and one when it is made."""
from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from torchckpt.notices import LOGGER, terminal
from torchckpt.planning.remat.plan import Plan

__all__ = ["Watch", "log", "log_unread", "stopwatch"]

_PATIENCE_SECONDS, _BETWEEN_SECONDS, _BETWEEN_LINES_SECONDS = 3.0, 0.2, 10.0
_BETWEEN_OPERATORS = 100
_WIDTH = 79


def _clock() -> float:
    return time.perf_counter()


class Watch:
    """A watch on tracing and planning, not on operators. It counts the seconds of planning, and shows what is being
    done from some seconds on: on stderr, if that is a terminal, else in the log."""

    def __init__(self) -> None:
        self.planning_seconds = 0.0

    @contextmanager
    def tracing(self, what: str) -> Iterator[Callable[[object], None]]:
        """Show that ``what`` is traced. Gives a function to call with each operator of the trace."""
        line, operators = _Line(f"torchckpt traces {what}"), count(1)

        def tell(_: object) -> None:
            number = next(operators)
            if number % _BETWEEN_OPERATORS == 0:
                line.show(f"{number} operations")

        try:
            yield tell
        finally:
            line.remove()

    @contextmanager
    def planning(self, operations: int) -> Iterator[Callable[[str], None]]:
        """Time the planning of so many operations. Gives a function that shows what is being done."""
        start_seconds = _clock()
        line = _Line(f"torchckpt plans {operations} operations", start_seconds)
        try:
            yield line.show
        finally:
            line.remove()
            self.planning_seconds += _clock() - start_seconds


class _Line:
    """One line on a terminal, overwritten by each update and erased by ``remove()``. Elsewhere a line in the log, now
    and then. It counts from ``start_seconds``, or from its first update."""

    def __init__(self, head: str, start_seconds: float | None = None) -> None:
        self._head, self._stream = head, terminal()
        self._start_seconds = start_seconds
        self._shown_seconds: float | None = None
        self._between_seconds = _BETWEEN_LINES_SECONDS if self._stream is None else _BETWEEN_SECONDS

    def show(self, what: str) -> None:
        if self._stream is None and not LOGGER.isEnabledFor(logging.INFO):
            return
        now = _clock()
        start = self._start_seconds = now if self._start_seconds is None else self._start_seconds
        last = self._shown_seconds
        if now - start >= _PATIENCE_SECONDS and (last is None or now - last >= self._between_seconds):
            text = f"{self._head}: {what}, {now - start:.0f} s"
            self._shown_seconds = now
            if self._stream is None:
                LOGGER.info(text)
            else:
                self._write(f"\r{text[:_WIDTH]}\x1b[K")

    def remove(self) -> None:
        if self._shown_seconds is not None:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()


def stopwatch() -> Callable[[], float]:
    """A function that returns the seconds since this call."""
    start_seconds = _clock()
    return lambda: _clock() - start_seconds


def log(
    function: str, what: Any, reason: Callable[[], str], seconds: float, planning_seconds: float, plan: Plan | None
) -> None:
    """Log one line about a trace: seconds to trace and to plan, the reason, and the plan."""
    if not LOGGER.isEnabledFor(logging.INFO):
        return
    planned = "with nothing to differentiate" if plan is None else repr(plan).strip("<>")
    LOGGER.info(
        "%s: %s traced in %.2f s and planned in %.2f s, because of %s. %s",
        function, type(what).__name__, max(0.0, seconds - planning_seconds), planning_seconds, reason(), planned,
    )


def log_unread(what: Any, missing: int, plan: Callable[[], Plan | None]) -> None:
    """Log one line about a backward that the gradients of so many outputs did not reach."""
    if LOGGER.isEnabledFor(logging.INFO):
        told = type(what).__name__, missing, repr(plan()).strip("<>")
        LOGGER.info("%s: backward without %d of the outputs' gradients. %s", *told)
