"""Isolated: a function runs in a process of its own, a fork of this one, within seconds and bytes."""
from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import Any

__all__ = ["isolated"]

_PIECE = 1 << 16


def isolated(function: Callable[[], dict[str, Any]], seconds: float, most_bytes: int) -> dict[str, Any]:
    """What ``function`` returns, or ``{"reason": ...}`` where it raises, takes too long, or too much memory."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        _answer(function, writes, most_bytes)
    os.close(writes)
    text = _read(reads, time.monotonic() + seconds)
    if text is None:
        os.kill(child, signal.SIGKILL)
    os.close(reads)
    _, status = os.waitpid(child, 0)
    if text is None:
        return {"reason": f"it took more than {seconds:.0f} s"}
    if not text:
        return {"reason": f"the process ended with status {status}"}
    found: dict[str, Any] = json.loads(text)
    return found


def _answer(function: Callable[[], dict[str, Any]], writes: int, most_bytes: int) -> None:
    """The child's part. It never returns."""
    try:
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
        found = function()
    except BaseException as error:  # also what a library raises to end the process
        lines = str(error).strip().splitlines() or [""]
        found = {"reason": f"{type(error).__name__}: {' '.join(lines)[:1200]}"}
    with os.fdopen(writes, "w") as pipe:
        pipe.write(json.dumps(found))
    os._exit(0)


def _read(reads: int, until: float) -> bytes | None:
    pieces = []
    while select.select([reads], [], [], max(0.0, until - time.monotonic()))[0]:
        piece = os.read(reads, _PIECE)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
    return None
