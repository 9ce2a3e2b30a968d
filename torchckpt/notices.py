"""Notices: lines for people, on stderr where that is a terminal, and else in the log."""
from __future__ import annotations

import logging
import sys
from typing import TextIO

__all__ = ["LOGGER", "notice", "terminal"]

LOGGER = logging.getLogger("torchckpt")


def terminal() -> TextIO | None:
    """Where stderr is a terminal, that; else None, as in a process without one."""
    stream: TextIO | None = sys.stderr
    return stream if stream is not None and stream.isatty() else None


def notice(text: str) -> None:
    """Say one line."""
    stream = terminal()
    if stream is None:
        LOGGER.info(text)
    else:
        print(text, file=stream, flush=True)
